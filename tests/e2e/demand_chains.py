"""What the script models of the demand tests say, and their chat templates.

One chain per prompt, named by what it is about; the tests of demands.md's rows ask for them. A
piece that bad_words or a prompt is to find again must occur once in all chains.
"""

from __future__ import annotations

from pathlib import Path

from script_model import (
    BYTE_LEVEL,
    EOS,
    METASPACE,
    TURN_END,
    Script,
    ScriptModel,
    Step,
    single_bytes,
)

EMOJI_FAMILY = "👩‍👩‍👧"
NUMBERS = tuple(f" {number}" for number in range(24))
LONG = tuple(f" {word}" for word in ("over", "and", "over", "again")) * 16
CHAINS: dict[str, tuple[Step, ...]] = {
    # Whole text, whatever the cut into tokens.
    "words": (" The", " quick", " brown", " fox", "es", " jump", "\n", "\n", " over", ".", "  "),
    "joined": ("ing", " and", " so", "-", "on"),
    "emoji": ("Hi ", *single_bytes("😀"), "!"),
    "emoji family": ("A", *single_bytes(f"{EMOJI_FAMILY}e\u0301"), "."),
    "cyrillic": (*single_bytes("Привет, "), "мир"),
    "chinese": (*single_bytes("你好"), "，", "世界", *single_bytes("。")),
    "cut": ("end", b"\xf0", b"\x9f", b"\x98"),
    "stray": ("a", b"\x80", "b", b"\xe4", "c"),
    "numbers": NUMBERS,
    "spaces": ("x", "    ", ".", " ,", "  ", "!", " ?", " n't", " 's", "    ", "."),
    "tool": ("<tool>", " a", " ", "</tool>", " b"),
    "think": ("<think>", "hm", "</think>", " so"),
    # Ends.
    "lines": ("first", " line", "\n", "second", " line"),
    "code": (" call", " quick", "Sort", "(", "list", ")", "\n", "end"),
    "list": ("a", ",", " b", ",", "c", "; d"),
    "alphabet": (" ABC", "DEF", "G", "HI", "J", "KL", "MN"),
    "letters": ("a", ",", "b", ",", "d", ",", "e"),
    "mark": ("before", "<|mark|>", "after"),
    "turn": ("Hi", "!", TURN_END),
    "goodbye": ("Bye", "!"),
    "eager": (*({EOS: 30.0, TURN_END: 25.0, letter: 20.0} for letter in "abcdefgh"),),
    # Choices.
    "capital": ({" London": 30.0, "London": 28.0, " Lon": 26.0, " Paris": 20.0}, " is"),
    "river": ("River", {"side": 30.0, "bank": 20.0}, "."),
    "colour": (
        {" red": 4.0, " green": 3.0, " blue": 2.0},
        {" light": 2.0, " dark": 1.0},
        {".": 1.0, "!": 0.5},
    ),
    "chat": ("Hello", ".", TURN_END),
}
LOOPS: dict[str, tuple[Step, ...]] = {
    "past the end": ("one", EOS, " two", TURN_END, " three"),
    "long": LONG,
}

# Gemma's refusals, tools, a variable, and a generation prompt that chooses the answer.
BYTE_LEVEL_TEMPLATE = """\
{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if tools %}{{ '<|im_start|>tools\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n#' + (answer or 'chat') }}{% endif %}"""
# Llama 2's, which takes a system message, and fails by itself on `per_line` 0.
METASPACE_TEMPLATE = """\
{{ bos_token }}
{%- if messages[0].role == 'system' %}
{{- '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n' }}{% set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- '[INST] ' + message.content + ' [/INST]' if message.role == 'user' else message.content }}
{%- endfor %}
{%- if per_line is defined %}{{ 80 // per_line }}{% endif %}
{%- if add_generation_prompt %}{{ '#chat' }}{% endif %}"""
_TEMPLATES = {BYTE_LEVEL: BYTE_LEVEL_TEMPLATE, METASPACE: METASPACE_TEMPLATE}


def write(family: str, directory: Path) -> ScriptModel:
    script = Script(family)
    for name, steps in CHAINS.items():
        script.chain(name, *steps)
    for name, steps in LOOPS.items():
        script.chain(name, *steps, loop=True)
    return script.write(directory, chat_template=_TEMPLATES[family])
