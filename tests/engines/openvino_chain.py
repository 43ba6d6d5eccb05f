"""Greedy answers of OpenVINO GenAI in float32, run by the interpreter of its own environment.

Arguments: the target's folder, and that of a head or nothing. Reads {"prompts", "max_tokens", "depth"} as JSON, writes
{"answers", "accepted"}: token ids, and how many of the drafted tokens were accepted.
"""

import json
import os
import sys

import numpy as np
import openvino
import openvino_genai as genai

job = json.load(sys.stdin)
target, *head = sys.argv[1:]
exact = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "INFERENCE_NUM_THREADS": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
}
scheduler = genai.SchedulerConfig()
scheduler.cache_size = 1  # GB
drafts = {"draft_model": genai.draft_model(head[0], "CPU", **exact)} if head else {}
pipeline = genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **drafts, **exact)
config = genai.GenerationConfig(max_new_tokens=job["max_tokens"], do_sample=False)
if head:
    config.num_assistant_tokens = job["depth"]

answers, accepted = [], 0
for prompt in job["prompts"]:
    ids = np.array([prompt], dtype=np.int64)
    result = pipeline.generate(genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))), config)
    answers.append(list(result.tokens[0]))
    if head:
        accepted += result.extended_perf_metrics.get_num_accepted_tokens()
json.dump({"answers": answers, "accepted": accepted}, sys.stdout)
