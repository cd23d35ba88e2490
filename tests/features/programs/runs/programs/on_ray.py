"""A program that tells where it found the policy, and asks a model beside it."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

import openai

client = openai.OpenAI()
client.chat.completions.create(model="m", messages=[{"role": "user", "content": "guess"}])
question = [{"role": "user", "content": "is it right?"}]
verdict = client.chat.completions.create(model="judge", messages=question, temperature=1.0)
place = urlsplit(str(client.base_url))
metrics = {"port": place.port, "is_loopback": str(place.hostname).startswith("127.")}
print(json.dumps({"reward": float(verdict.choices[0].message.content), "metrics": metrics}))
