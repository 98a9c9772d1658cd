"""OpenVINO GenAI's continuous batching; argument: a directory that its tools made (an IR)."""

from __future__ import annotations

import sys

import numpy as np
import openvino
import openvino_genai
from measure import measure
from workload import Request


def main() -> None:
    (directory,) = sys.argv[1:]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1
    pipeline = openvino_genai.ContinuousBatchingPipeline(directory, scheduler, "CPU")

    def answer(requests: list[Request]) -> int:
        prompts = [
            openvino.Tensor(np.array([request.prompt_token_ids], dtype=np.int64))
            for request in requests
        ]
        configs = []
        for request in requests:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = config.min_new_tokens = request.max_tokens
            config.ignore_eos = True
            config.do_sample = False
            configs.append(config)
        results = pipeline.generate(prompts, configs)
        return sum(len(result.m_generation_ids[0]) for result in results)

    measure("OpenVINO GenAI", openvino_genai.__version__, answer)


if __name__ == "__main__":
    main()
