"""The package `renderers` as an oracle of given tokens: FOLDER of tokenizers; reads cases, prints their ids.

A case: family, role, observation, and the ids of prompt and turn; the answer is what follows them, or null.
"""

import json
import sys

from renderers import create_renderer
from renderers.configs import (
    DeepSeekR1RendererConfig,
    DeepSeekV3RendererConfig,
    Llama3RendererConfig,
    Qwen3RendererConfig,
)
from transformers import AutoTokenizer

FAMILIES = {
    "Qwen3": ("qwen3", Qwen3RendererConfig()),
    # Not its own policy, which is to render all again: what a sampled history is continued with.
    "Qwen3 as sampled": ("qwen3", Qwen3RendererConfig(thinking_retention="all")),
    "Llama 3.1": ("llama3_2", Llama3RendererConfig()),
    "DeepSeek V3": ("deepseek_v3", DeepSeekV3RendererConfig()),
    "R1": ("deepseek_v3", DeepSeekR1RendererConfig(thinking_retention="all")),
}

renderers = {}
found = []
for case in json.load(sys.stdin):
    folder, config = FAMILIES[case["family"]]
    if case["family"] not in renderers:
        tokenizer = AutoTokenizer.from_pretrained(f"{sys.argv[1]}/{folder}")
        renderers[case["family"]] = create_renderer(tokenizer, config)
    message = {"role": case["role"], "content": case["observation"]}
    bridge = renderers[case["family"]].bridge_to_next_turn(case["prompt"], case["turn"], [message])
    before = case["prompt"] + case["turn"]
    assert bridge is None or bridge.token_ids[: len(before)] == before
    found.append(bridge and bridge.token_ids[len(before) :])
print("FOUND", json.dumps(found))
