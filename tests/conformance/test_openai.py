"""The official openai client, unchanged, against a real cluster."""

import openai
import pytest

import cluster as cl


@pytest.fixture
def client(plain):
    with openai.OpenAI(base_url=plain.base + "/v1", api_key="none", max_retries=0, timeout=120 * cl.SLOW) as one:
        yield one


MESSAGES = [{"role": "user", "content": "What are the three primary colours?"}]  # a golden prompt


def test_models(client):
    models = list(client.models.list())
    assert [model.id for model in models][0] == cl.MODEL_NAME
    assert models[0].object == "model"


def test_chat(client):
    answer = client.chat.completions.create(model=cl.MODEL_NAME, messages=MESSAGES, temperature=0, max_tokens=24)
    assert answer.object == "chat.completion" and answer.model == cl.MODEL_NAME and answer.id
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content.startswith("The three primary colours are: Red"), "the reference's answer begins so"
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens <= 24


def test_chat_equals_the_reference(client, golden):
    """The template is rendered exactly: as many tokens as the golden prompt, and its answer."""
    case = golden["chat_single"]
    chat = client.chat.completions.create(model=cl.MODEL_NAME, messages=MESSAGES, temperature=0, max_tokens=32)
    assert chat.usage.prompt_tokens == case["n_prompt"]
    plain = client.completions.create(model=cl.MODEL_NAME, prompt=case["prompt_ids"], temperature=0, max_tokens=32)
    assert chat.choices[0].message.content == plain.choices[0].text
    sure = next((i for i, (gap, _) in enumerate(case["hf_fp32"]["top2_gap_and_runner_up"]) if gap < 0.4), 12)
    again = client.completions.create(
        model=cl.MODEL_NAME, prompt=case["prompt_ids"], temperature=0, max_tokens=max(sure, 1),
        extra_body={"return_token_ids": True, "ignore_eos": True})
    assert again.choices[0].token_ids[:sure] == case["hf_fp32"]["ids"][:sure]


def test_chat_streaming_equals_the_whole_answer(client):
    options = {"model": cl.MODEL_NAME, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 24}
    whole = client.chat.completions.create(**options)
    text, finish, roles = "", None, []
    for chunk in client.chat.completions.create(stream=True, **options):
        assert chunk.object == "chat.completion.chunk" and chunk.usage is None
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            if choice.delta.role:
                roles.append(choice.delta.role)
    assert text == whole.choices[0].message.content
    assert finish == whole.choices[0].finish_reason
    assert roles[:1] == ["assistant"]


def test_include_usage(client):
    chunks = list(client.chat.completions.create(
        model=cl.MODEL_NAME, messages=MESSAGES, temperature=0, max_tokens=8, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert all(chunk.usage is None for chunk in chunks[:-1])
    usage = chunks[-1].usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_chat_with_system_and_turns_and_text_parts(client):
    answer = client.chat.completions.create(
        model=cl.MODEL_NAME, temperature=0, max_tokens=8,
        messages=[
            {"role": "system", "content": "You answer with one word."},
            {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "yes."}]},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Again."},
        ])
    assert answer.usage.prompt_tokens > 20


def test_completions_with_text_and_with_ids(client, plain):
    text = "The capital of France is"
    ids = plain.http.post("/tokenize", json={"model": cl.MODEL_NAME, "prompt": text}).json()["tokens"]
    by_text = client.completions.create(model=cl.MODEL_NAME, prompt=text, temperature=0, max_tokens=8)
    by_ids = client.completions.create(model=cl.MODEL_NAME, prompt=ids, temperature=0, max_tokens=8)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.usage.prompt_tokens == by_ids.usage.prompt_tokens == len(ids)
    assert by_text.object == "text_completion"


def test_tokenize_and_detokenize_are_inverse(plain):
    for text in ("Hello, world!", "naïve café 🙂 漢字", "  two  spaces\n\ttab", "x" * 300):
        ids = plain.http.post("/tokenize", json={"model": cl.MODEL_NAME, "prompt": text}).json()["tokens"]
        back = plain.http.post("/detokenize", json={"model": cl.MODEL_NAME, "tokens": ids}).json()["prompt"]
        assert back == text


def test_several_prompts(client):
    answer = client.completions.create(model=cl.MODEL_NAME, prompt=["One, two,", "A, B,"], temperature=0, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1]
    single = client.completions.create(model=cl.MODEL_NAME, prompt="A, B,", temperature=0, max_tokens=4)
    assert answer.choices[1].text == single.choices[0].text


def test_stop_string(client):
    """A01: what is streamed and what is whole are the text up to the stop, no part of which is sent."""
    options = {"model": cl.MODEL_NAME, "prompt": "Count from one to thirty in words:", "temperature": 0, "max_tokens": 64}
    text = client.completions.create(**options).choices[0].text
    assert len(text) > 30
    stops = {text[start:start + length] for start in range(4, len(text) - 12, 5) for length in (3, 7, 12)}
    for stop in sorted(stops)[:: max(1, len(stops) // 14)]:
        want = text[: text.index(stop)]
        whole = client.completions.create(stop=[stop], **options).choices[0]
        assert (whole.text, whole.finish_reason) == (want, "stop"), stop
        streamed, finish = "", None
        for chunk in client.completions.create(stop=stop, stream=True, **options):
            for choice in chunk.choices:
                streamed += choice.text
                finish = choice.finish_reason or finish
                assert want.startswith(streamed), f"{streamed!r} goes beyond {want!r}"
        assert (streamed, finish) == (want, "stop"), stop


def test_seed(client):
    options = {"model": cl.MODEL_NAME, "messages": MESSAGES, "temperature": 1.0, "max_tokens": 16, "seed": 7}
    first, second = (client.chat.completions.create(**options).choices[0].message.content for _ in range(2))
    assert first == second


def test_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="no-such-model", messages=MESSAGES)
    assert "no-such-model" in caught.value.message and caught.value.param == "model"


def test_bad_requests(client):
    for options in ({"temperature": -1}, {"top_p": 0}, {"max_tokens": 0}, {"messages": []}, {"stop": [""]}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{"model": cl.MODEL_NAME, "messages": MESSAGES, **options})
        assert caught.value.type == "invalid_request_error", options
        assert caught.value.param == next(iter(options)), (options, caught.value.param)


def test_unknown_path_and_method(plain):
    response = plain.http.get("/v1/no-such")
    assert response.status_code == 404 and response.json()["error"]["message"]
    response = plain.http.get("/v1/chat/completions")
    assert response.status_code == 405 and response.json()["error"]["message"]


def test_metrics_have_the_names_that_dashboards_read(plain, client):
    client.completions.create(model=cl.MODEL_NAME, prompt="Hi", max_tokens=2)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"):
        assert plain.metric(name) is not None, name
    # the gauge falls when the decode worker's end of the sequence is handled, which may be after the answer
    cl.wait_until(lambda: plain.metric("vllm:num_requests_running") == 0, 10, "no request running")


def test_an_answer_whose_length_is_not_given_has_the_deployments():
    """KV blocks are set aside for all that an answer may have: a chat must not ask for the whole context."""
    limits = {"chat_tokens_default": 7, "max_tokens_default": 5}
    with cl.Cluster(router={"limits": limits}) as cluster:
        with openai.OpenAI(base_url=cluster.base + "/v1", api_key="none", max_retries=0, timeout=120 * cl.SLOW) as client:
            options = {"model": cl.MODEL_NAME, "temperature": 0, "extra_body": {"ignore_eos": True}}
            chat = client.chat.completions.create(messages=MESSAGES, **options)
            assert (chat.usage.completion_tokens, chat.choices[0].finish_reason) == (7, "length")
            text = client.completions.create(prompt="Once upon a time", **options)
            assert (text.usage.completion_tokens, text.choices[0].finish_reason) == (5, "length")
