"""transformers' generate: one left-padded batch, until the longest answer is done."""

from __future__ import annotations

import sys

import torch
import transformers
from measure import measure
from workload import Request


def main() -> None:
    (directory,) = sys.argv[1:]
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def answer(requests: list[Request]) -> int:
        longest = max(len(request.prompt_token_ids) for request in requests)
        padding = [longest - len(request.prompt_token_ids) for request in requests]
        ids = torch.tensor(
            [
                [0] * pad + request.prompt_token_ids
                for pad, request in zip(padding, requests, strict=True)
            ]
        )
        mask = (torch.arange(longest) >= torch.tensor(padding)[:, None]).long()
        most = max(request.max_tokens for request in requests)
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=most,
                max_new_tokens=most,
                pad_token_id=0,
            )
        return sum(request.max_tokens for request in requests)

    measure("transformers generate", transformers.__version__, answer)


if __name__ == "__main__":
    main()
