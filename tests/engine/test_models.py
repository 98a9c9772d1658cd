"""Every model family's logits against transformers' on small random checkpoints, in float32."""

import pytest
import torch

from pagestream.config import ModelConfig
from pagestream.models.registry import load_model
from pagestream_kernels import plan_attention

CPU = torch.device("cpu")
NUM_TOKENS, FIRST_PART = 200, 77
BLOCK_SIZE, NUM_BLOCKS = 16, 20
SHAPE = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama": ("Llama", {"head_dim": 8, "tie_word_embeddings": False}),
    "llama tied, biased": (
        "Llama",
        {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "llama 3.1": ("Llama", {"head_dim": 32, "rope_parameters": LLAMA3}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen3 tied": (
        "Qwen3",
        {"head_dim": 32, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}},
    ),
}


def make_checkpoint(directory, family, options):
    """Random in every weight: norms that are all ones would hide one that is left out."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**SHAPE, **options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.mul_(10)
    model.save_pretrained(directory)
    return model


def our_logits(model, config, input_ids):
    """In two parts, the second of which finds the first in the cache."""
    shape = (config.num_key_value_heads, config.head_dim)
    kv_cache = torch.zeros(config.num_hidden_layers, 2, NUM_BLOCKS, BLOCK_SIZE, *shape)
    table = torch.randperm(NUM_BLOCKS).to(torch.int32)[None]
    parts = []
    for start, end in ((0, FIRST_PART), (FIRST_PART, NUM_TOKENS)):
        positions = torch.arange(start, end)
        slots = table[0, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        ends = torch.tensor([0, end - start], dtype=torch.int32)
        seq_lens = torch.tensor([end], dtype=torch.int32)
        attention = plan_attention(ends, seq_lens, table, BLOCK_SIZE)
        hidden = model.forward(input_ids[start:end], positions, slots, attention, kv_cache)
        parts.append(model.logits(hidden))
    return torch.cat(parts)


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_logits_equal_transformers(tmp_path, case):
    theirs = make_checkpoint(tmp_path, *CASES[case])
    config = ModelConfig.from_hf(tmp_path)
    ours = load_model(config, tmp_path, NUM_TOKENS, torch.float32, CPU)
    input_ids = torch.randint(0, SHAPE["vocab_size"], (NUM_TOKENS,))
    expected = theirs(input_ids[None]).logits[0]
    assert expected.std() > 0.1, "logits too small to tell anything"
    torch.testing.assert_close(our_logits(ours, config, input_ids), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_dummy_weights_need_no_checkpoint_and_are_the_same_again(tmp_path, case):
    make_checkpoint(tmp_path, *CASES[case])
    (tmp_path / "model.safetensors").unlink()
    config = ModelConfig.from_hf(tmp_path)
    arguments = (config, tmp_path, NUM_TOKENS, torch.float32, CPU)
    with pytest.raises(FileNotFoundError, match="safetensors"):
        load_model(*arguments)
    models = [load_model(*arguments, load_format="dummy") for _ in range(2)]
    first, second = (model.targets() for model in models)
    assert all(first[name].equal(second[name]) for name in first)
    torch.manual_seed(1)
    input_ids = torch.randint(0, SHAPE["vocab_size"], (NUM_TOKENS,))
    logits = our_logits(models[0], config, input_ids)
    assert logits.isfinite().all()
    assert logits.std(dim=0).min() > 0, "every token looks the same"
