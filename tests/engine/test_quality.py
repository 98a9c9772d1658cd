"""`pagestream eval`: nothing is lost by no quantization, little by int8, and limits are heeded."""

import dataclasses
import random

import pytest
from typer.testing import CliRunner

from pagestream.cli.eval import report
from pagestream.cli.main import app
from pagestream.engine.quality import compare

IDS = random.Random(0).choices(range(3, 256), k=90)


def run(directory, quantization, window=32):
    calls = []
    quality = compare(directory, IDS, quantization, window, lambda *call: calls.append(call))
    assert calls[-1] == (90, 90)
    return quality


def test_the_same_model_twice_loses_nothing(tiny_model):
    quality = run(tiny_model, "none")
    assert quality.num_tokens == 89
    assert (quality.top1_agreement, quality.mean_kl) == (1, 0)
    assert quality.perplexity == quality.quantized_perplexity > 1


def test_int8_loses_little(tiny_model):
    quality = run(tiny_model, "int8")
    assert 0.9 < quality.perplexity_ratio < 1.1
    assert quality.top1_agreement > 0.9
    assert 0 < quality.mean_kl < quality.p99_kl


def test_one_missed_limit_is_enough(tiny_model, capsys):
    good = run(tiny_model, "none")
    assert report(good, "int8")
    assert not report(dataclasses.replace(good, top1_agreement=0.9), "int8")
    assert not report(dataclasses.replace(good, quantized_perplexity=good.perplexity * 1.1), "int8")
    assert "missed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--quantization", "int3"], "quantization must be one of none, int8"),
        (["--model", "nowhere/at-all"], "nowhere/at-all"),
    ],
)
def test_mistakes_are_told(arguments, words):
    result = CliRunner().invoke(app, ["eval", *arguments])
    assert result.exit_code == 1
    assert words in result.output
