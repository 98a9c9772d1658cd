"""pagestream's own offline engine; arguments: checkpoint directory, quantization."""

from __future__ import annotations

import importlib.metadata
import sys

from measure import measure
from workload import Request

from pagestream import LLM, SamplingParams


def main() -> None:
    directory, quantization = sys.argv[1:]
    llm = LLM(directory, quantization=quantization, num_blocks=200, enable_prefix_caching=False)

    def answer(requests: list[Request]) -> int:
        answers = llm.generate(
            prompt_token_ids=[request.prompt_token_ids for request in requests],
            sampling_params=[
                SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True)
                for request in requests
            ],
            use_tqdm=False,
        )
        return sum(len(one.token_ids) for one in answers)

    name = "pagestream" if quantization == "none" else f"pagestream {quantization}"
    measure(name, importlib.metadata.version("pagestream"), answer)


if __name__ == "__main__":
    main()
