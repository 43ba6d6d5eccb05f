"""OpenVINO GenAI, asked a line at a time; run by the interpreter of its own environment, so it imports nothing of eyas.

Arguments: the target's folder and the head's. It says "ready", then answers each line {"ids", "new", "eos", "draft",
"temperature", "top_p", "top_k", "seed"} by {"ids", "rounds", "first_s"}: the tokens written, how many came at a time, and the
seconds to the first.
"""

import json
import os
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai


class Rounds(genai.StreamerBase):
    """Counts the tokens of every call: a round's come together."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []
        self.first = 0.0

    def write(self, tokens: Any) -> Any:
        self.first = self.first or time.perf_counter()
        self.lengths.append(1 if isinstance(tokens, int) else len(tokens))
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


def options(job: dict[str, Any]) -> Any:
    """GenAI's own for a job."""
    told = {"max_new_tokens": job["new"], "do_sample": job["temperature"] > 0, "num_assistant_tokens": job["draft"]}
    if job["temperature"] > 0:
        told |= {"temperature": job["temperature"], "top_p": job["top_p"], "rng_seed": job["seed"]}
        told |= {"top_k": job["top_k"]} if job["top_k"] else {}
    config = genai.GenerationConfig(**told)
    config.stop_token_ids = set(job["eos"])
    config.ignore_eos = not job["eos"]
    return config


def main(target: str, head: str) -> None:
    threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": threads}
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.enable_prefix_caching = False  # each prompt is read anew, as by the others
    draft = genai.draft_model(head, "CPU", **exact)
    pipeline = genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, draft_model=draft, **exact)
    print("ready", flush=True)
    for line in sys.stdin:
        job, rounds = json.loads(line), Rounds()
        ids = np.array([job["ids"]], dtype=np.int64)
        prompt = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        begun = time.perf_counter()
        result = pipeline.generate(prompt, options(job), rounds)
        told = {"ids": list(result.tokens[0]), "rounds": rounds.lengths, "first_s": rounds.first - begun}
        print(json.dumps(told), flush=True)


main(*sys.argv[1:])
