"""Purpose-made tokenizers, one of each family, trained on the spot and saved as model directories.

`make_tokenizer` writes what AutoTokenizer reads: tokenizer.json, tokenizer_config.json and
chat_template.jinja. Every family has <unk>, a BOS, an EOS, two more special tokens of its chat
template, the added but not special token <tool_call>, and a piece (or byte token) for every byte
where it has any.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "Hello, world! This is a plain sentence; isn't it? I'm sure it's one of many.",
    "The quick brown fox jumps over the lazy dog, and then it runs home again.",
    "You are a helpful assistant. user assistant system tool\n\nWhat is the weather in Paris?",
    "def quick_sort(items):\n    return sorted(items)  # 1234567890, 3.14159, v2.0\n",
    "naïve café, “quotes” … € and déjà vu; Straße, Äpfel, ångström, señor, coração",
    "Гляжу на русский текст и не вижу ошибок. Это простое предложение, и оно не одно.",
    "Η γρήγορη καφέ αλεπού πηδάει πάνω από τον τεμπέλη σκύλο.",
    "日本語のテキストと漢字、ひらがなとカタカナ。これは文章です。",
    "这是一个简单的中文句子，包含标点符号。今天天气很好。",
    "한국어 문장입니다. 오늘은 날씨가 좋습니다.",
    "هذا نص عربي بسيط، وهو جملة واحدة. זה משפט פשוט בעברית.",
    "यह हिन्दी का एक सरल वाक्य है। ইহা একটি বাংলা বাক্য। இது ஒரு தமிழ் வாக்கியம்.",
    "นี่คือประโยคภาษาไทย ทดสอบการตัดคำ",
    '{"role": "user", "content": "a,b,c"} [INST] <b>bold</b> | pipes | tabs\there',
]

TOOL_TOKEN = "<tool_call>"
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]

_LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}<|header|>tools<|end_header|>

{{ tools | tojson }}</s>{% endif %}
{%- for message in messages %}<|header|>{{ message['role'] }}<|end_header|>

{% if message['content'] is string %}{{ message['content'] }}
{%- else %}{% for part in message['content'] or [] %}{{ part['text'] }}{% endfor %}{% endif %}
{%- for call in message['tool_calls'] or [] %}<tool_call>{{ call | tojson }}{% endfor %}</s>
{%- endfor %}
{%- if add_generation_prompt %}<|header|>assistant<|end_header|>

{% endif %}"""

_LLAMA2_TEMPLATE = """\
{%- for message in messages %}
{%- if message['role'] not in ('user', 'assistant') %}
{{- raise_exception('The ' + message['role'] + ' role is not supported') }}
{%- elif (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- elif message['role'] == 'user' %}
{{- bos_token + '[INST] ' + message['content'] + ' [/INST]' }}
{%- else %}
{{- ' ' + message['content'] + ' ' + eos_token }}
{%- endif %}
{%- endfor %}"""

_ZEPHYR_TEMPLATE = """\
{%- for message in messages %}<|header|>{{ message['role'] }}<|end_header|>
{{ message['content'] }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}<|header|>assistant<|end_header|>
{% endif %}"""

_PLAIN_TEMPLATE = """\
{%- for message in messages -%}
<|header|>{{ message['role'] }}: {{ message['content'] }}<|end_header|>
{%- endfor %}
{%- if add_generation_prompt %}<|header|>assistant: {% endif %}"""


@dataclass(frozen=True)
class Family:
    train: Callable[[], Tokenizer]
    bos: str
    chat_template: str
    byte_fallback: bool = False
    config: tuple[tuple[str, Any], ...] = ()

    @property
    def special(self) -> list[str]:
        return _special(self.bos)


def make_tokenizer(family: str, directory: Path) -> None:
    """Write the tokenizer files of ``family`` (a key of FAMILIES) into ``directory``."""
    chosen = FAMILIES[family]
    tokenizer = chosen.train()
    tokenizer.add_tokens([AddedToken(TOOL_TOKEN, special=False, normalized=False)])
    spec = json.loads(tokenizer.to_str())
    # A trainer marks every token that it is given as special; Llama's byte tokens are ordinary.
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] not in BYTE_TOKENS]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": chosen.bos,
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        **dict(chosen.config),
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False), "utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2), "utf-8")
    (directory / "chat_template.jinja").write_text(chosen.chat_template, "utf-8")


def _special(bos: str) -> list[str]:
    return ["<unk>", bos, "</s>", "<|header|>", "<|end_header|>"]


def _byte_level() -> Tokenizer:
    """GPT-2 and Llama 3: pieces spell bytes; the post-processor adds BOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=_special("<|begin|>"),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_affixes(tokenizer, "<|begin|> $A")


def _llama2() -> Tokenizer:
    """Llama 2: the normalizer writes the lower blocks, so each text between special tokens gets one
    in front; bytes for what the vocabulary lacks."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return _trained(tokenizer)


def _metaspace() -> Tokenizer:
    """Mistral: the pre-tokenizer writes the lower blocks, only the first one of a text is added."""
    tokenizer = _sentencepiece_bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _trained(tokenizer)


def _sentencepiece_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def _trained(tokenizer: Tokenizer) -> Tokenizer:
    # Words, or merges would span the spaces between them.
    words = [word for text in CORPUS for word in text.split(" ")]
    trainer = trainers.BpeTrainer(
        vocab_size=800,
        special_tokens=[*_special("<s>"), *BYTE_TOKENS],
        limit_alphabet=120,
        show_progress=False,
    )
    tokenizer.train_from_iterator(words, trainer)
    return _with_affixes(tokenizer, "<s> $A")


def _unigram() -> Tokenizer:
    """T5 and XLM-R: scored pieces, no bytes; what is not in the vocabulary is <unk>."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=600, special_tokens=_special("<s>"), unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_affixes(tokenizer, "$A </s>")


def _with_affixes(tokenizer: Tokenizer, single: str) -> Tokenizer:
    names = [name for name in single.split() if name != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(name, tokenizer.token_to_id(name)) for name in names]
    )
    return tokenizer


FAMILIES = {
    "byte_level": Family(_byte_level, "<|begin|>", _LLAMA3_TEMPLATE),
    "llama2": Family(_llama2, "<s>", _LLAMA2_TEMPLATE, byte_fallback=True),
    "metaspace": Family(_metaspace, "<s>", _ZEPHYR_TEMPLATE, byte_fallback=True),
    "unigram": Family(
        _unigram, "<s>", _PLAIN_TEMPLATE, config=(("clean_up_tokenization_spaces", True),)
    ),
}
