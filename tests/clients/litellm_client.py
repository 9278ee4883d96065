"""litellm against the server: `python litellm_client.py URL`."""

import asyncio
import os
import sys
from importlib.metadata import version

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches a list of prices

import litellm
from expected import ANSWER, COMPLETION, MODEL, NUM_TOKENS, PROMPT, QUESTION

MESSAGES = [{"role": "user", "content": QUESTION}]


def of_a_provider(prefix: str, text_prefix: str, flags: dict) -> None:
    """Try whole and streamed chats, and completions, through one provider's prefix."""
    greedy = flags | {"max_tokens": NUM_TOKENS, "temperature": 0}
    reply = litellm.completion(model=prefix + MODEL, messages=MESSAGES, **greedy)
    assert reply.choices[0].message.content == ANSWER
    chunks = list(
        litellm.completion(
            model=prefix + MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **greedy
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[-1].usage.total_tokens == reply.usage.total_tokens
    assert litellm.text_completion(model=text_prefix + MODEL, prompt=PROMPT, **greedy).choices[0].text == COMPLETION


def main(url: str) -> None:
    """Run every check against the server at URL."""
    litellm.telemetry = False
    flags = {"api_base": url, "api_key": "x"}
    of_a_provider("hosted_vllm/", "hosted_vllm/", flags)
    of_a_provider("openai/", "text-completion-openai/", flags)
    reply = litellm.responses(model="openai/" + MODEL, input=QUESTION, max_output_tokens=6, temperature=0, **flags)
    assert reply.output[0].content[0].text.startswith(ANSWER)  # litellm asks for 16 tokens at least
    own = {"top_k": 1, "ignore_eos": True}
    reply = litellm.completion(model="hosted_vllm/" + MODEL, messages=MESSAGES, max_tokens=6, extra_body=own, **flags)
    assert reply.choices[0].message.content == ANSWER
    try:
        litellm.completion(model="hosted_vllm/nope", messages=MESSAGES, num_retries=0, **flags)
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError("a model that does not exist was served")
    later = litellm.acompletion(model="hosted_vllm/" + MODEL, messages=MESSAGES, max_tokens=2, **flags)
    assert asyncio.run(later).choices[0].finish_reason == "length"


if __name__ == "__main__":
    main(f"{sys.argv[1]}/v1")
    print(f"litellm {version('litellm')}")
