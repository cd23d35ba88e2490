"""vLLM's token-in endpoint: ids in, ids and log-probs out, which go on as they are."""

import json
import os
import urllib.request

base = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
ids = [5, 6, 7]
for _ in range(2):
    body = {"token_ids": ids, "sampling_params": {"max_tokens": 9, "logprobs": 0}}
    request = urllib.request.Request(
        f"{base}/inference/v1/generate", data=json.dumps(body).encode()
    )
    with urllib.request.urlopen(request) as response:
        [choice] = json.load(response)["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{id}" for id in choice["token_ids"]]
    ids += choice["token_ids"] + [8]
print(len(ids))
