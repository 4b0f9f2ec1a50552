"""Greedy decoding in vLLM; runs under vLLM's own interpreter and imports nothing of ours.

Standard input: {"model", "heads" (or null), "num_heads", "prompts", "max_new_tokens", "eos", "result"}. The file named
``result`` receives {"tokens" (per prompt), "drafts", "accepted", "accepted_at" (per depth), "version"}.
"""

import json
import sys


def main() -> None:
    import vllm
    from vllm import LLM, SamplingParams

    job = json.load(sys.stdin)
    speculation = {"method": "medusa", "model": job["heads"], "num_speculative_tokens": job["num_heads"]}
    llm = LLM(
        model=job["model"],
        skip_tokenizer_init=True,  # token ids in and out: nothing between the two engines but tokens
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config=speculation if job["heads"] else None,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in job["prompts"]],
        SamplingParams(temperature=0.0, max_tokens=job["max_new_tokens"], detokenize=False, stop_token_ids=job["eos"]),
    )
    counted = {"drafts": 0, "accepted": 0, "accepted_at": []}
    for metric in llm.get_metrics():
        match metric.name:
            case "vllm:spec_decode_num_drafts":
                counted["drafts"] = metric.value
            case "vllm:spec_decode_num_accepted_tokens":
                counted["accepted"] = metric.value
            case "vllm:spec_decode_num_accepted_tokens_per_pos":
                counted["accepted_at"] = list(metric.values)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    with open(job["result"], "w") as file:
        json.dump(counted | {"tokens": tokens, "version": vllm.__version__}, file)


if __name__ == "__main__":  # vLLM starts processes that import this file
    main()
