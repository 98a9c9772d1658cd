"""vLLM's offline engine; argument: checkpoint directory."""

from __future__ import annotations

import sys

import vllm
from measure import measure
from workload import Request


def main() -> None:
    (directory,) = sys.argv[1:]
    llm = vllm.LLM(
        directory, dtype="float32", max_model_len=1024, enable_prefix_caching=False, seed=0
    )

    def answer(requests: list[Request]) -> int:
        outputs = llm.generate(
            [{"prompt_token_ids": request.prompt_token_ids} for request in requests],
            [
                vllm.SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
                for request in requests
            ],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    measure("vLLM", vllm.__version__, answer)


if __name__ == "__main__":
    main()
