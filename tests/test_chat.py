"""Rendering and supervision: what is trained on is what the server would have seen and written, token for token."""

from __future__ import annotations

import random

import pytest

from eyas.chat import (
    Sample,
    encode,
    end_of_turn_ids,
    merge_turns,
    parse_flags,
    render,
    render_text,
    supervised_rows,
    template_hash,
)
from eyas.data.inspection import coloured, sample_warnings
from eyas.errors import EyasError
from tests.toy_tokenizers import CHATML, LLAMA3, MISTRAL, PHI, PLAIN, QWEN3, assistant, toy_tokenizer, user

CHAT = [
    user("hello you"),
    assistant("hello"),
    user("and now?"),
    assistant("more\n\nhello"),
    user("end"),
    assistant("bye"),
]


def spoken(tokenizer, sample):
    """The supervised texts of a sample."""
    return [tokenizer.decode(sample.ids[a:b], skip_special_tokens=False) for a, b in sample.spans]


def test_append_only_template_gives_one_row_with_every_answer_and_its_end():
    tokenizer = toy_tokenizer(CHATML)
    (row,) = supervised_rows(tokenizer, CHAT, id="c")
    assert row.id == "c"
    assert spoken(tokenizer, row) == ["hello<|im_end|>", "more\n\nhello<|im_end|>", "bye<|im_end|>"]
    whole = render(tokenizer, CHAT, generation_prompt=False)
    assert row.ids == whole[: len(row.ids)]
    assert tokenizer.decode(whole[len(row.ids) :]) == "\n"  # what the template adds after the last end is no part of it
    assert row.supervised == sum(row.mask()) == sum(b - a for a, b in row.spans)


def test_every_answer_follows_exactly_the_ids_that_the_server_was_given():
    for template in (CHATML, LLAMA3, PHI, MISTRAL):
        tokenizer = toy_tokenizer(template, bos="<s>", eos="<|eot|>" if template in (LLAMA3, PHI) else "<|im_end|>")
        (row,) = supervised_rows(tokenizer, CHAT)
        for turn, (start, end) in enumerate(row.spans):
            assert row.ids[:start] == render(tokenizer, CHAT[: 2 * turn + 1])
            assert row.ids[end - 1] == tokenizer.eos_token_id
            assert tokenizer.eos_token_id not in row.ids[start : end - 1]


def test_exactly_one_bos_though_the_tokenizer_would_add_its_own():
    tokenizer = toy_tokenizer(LLAMA3, bos="<s>", eos="<|eot|>", adds_bos=True)
    assert tokenizer("hello")["input_ids"][0] == tokenizer.bos_token_id  # the trap is set
    ids = render(tokenizer, [user("hello")])
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
    (row,) = supervised_rows(tokenizer, CHAT)
    assert row.ids.count(tokenizer.bos_token_id) == 1
    assert all(tokenizer.bos_token_id not in row.ids[a:b] for a, b in row.spans)


def test_render_is_what_the_tokenizer_itself_renders():
    for template in (CHATML, LLAMA3, QWEN3, PHI, MISTRAL, PLAIN):
        tokenizer = toy_tokenizer(template, bos="<s>")
        for generation_prompt in (True, False):
            theirs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=generation_prompt)["input_ids"]
            assert render(tokenizer, CHAT, generation_prompt=generation_prompt) == theirs


def test_second_end_token_of_the_template_is_not_supervised():
    tokenizer = toy_tokenizer(PHI, eos="<|im_end|>")  # the text closes with EOS, turns with another token
    (row,) = supervised_rows(tokenizer, CHAT)
    assert spoken(tokenizer, row) == ["hello<|eot|>", "more\n\nhello<|eot|>", "bye<|eot|>"]


def test_template_that_strips_reasoning_gives_one_row_per_turn():
    tokenizer = toy_tokenizer(QWEN3)
    chat = [
        user("hello"), assistant("one", reasoning_content="deep"), user("and?"),
        assistant("two", reasoning_content="deeper"), user("end"), assistant("three", reasoning_content="deepest"),
    ]  # fmt: skip
    rows = supervised_rows(tokenizer, chat, id="q")
    assert [row.id for row in rows] == ["q#1", "q#2", "q#3"]
    for turn, row in enumerate(rows):
        ((start, end),) = row.spans
        assert row.ids[:start] == render(tokenizer, chat[: 2 * turn + 1])
        assert end == len(row.ids)
    assert spoken(tokenizer, rows[2]) == ["<think>\ndeepest\n</think>\n\nthree<|im_end|>"]
    assert "deep" not in tokenizer.decode(rows[2].ids[: rows[2].spans[0][0]])


def test_render_flags_reach_the_template_and_decide_what_is_supervised():
    tokenizer = toy_tokenizer(QWEN3)
    chat = [user("hello"), assistant("one")]
    (thinking,) = supervised_rows(tokenizer, chat)
    (silent,) = supervised_rows(tokenizer, chat, enable_thinking=False)
    assert thinking.ids == silent.ids
    assert spoken(tokenizer, thinking) == ["<think>\n\n</think>\n\none<|im_end|>"]
    assert spoken(tokenizer, silent) == ["one<|im_end|>"]
    start = silent.spans[0][0]
    assert silent.ids[:start] == render(tokenizer, chat[:1], enable_thinking=False)


def test_unstable_template_is_refused_naming_the_turn():
    # asks for reasoning in the prompt but does not write it in full
    template = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    with pytest.raises(EyasError, match=r"assistant turn 1: the chat template is unstable.*<think>"):
        supervised_rows(toy_tokenizer(template), CHAT)
    # only the second turn is unstable: the count of messages is written into the text before it
    counting = "{% if messages | length > 3 %}{{ messages | length }}{% endif %}" + CHATML
    with pytest.raises(EyasError, match="assistant turn 2: "):
        supervised_rows(toy_tokenizer(counting), CHAT)


def test_template_that_drops_the_answer_is_refused():
    silent = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(EyasError, match=r"assistant turn 1: .* does not write the answer"):
        supervised_rows(toy_tokenizer(silent), CHAT)


def test_token_that_reaches_over_the_boundary_keeps_the_ids_of_the_prompt():
    tokenizer = toy_tokenizer(CHATML)
    chat = [user("hello"), assistant("\nhello"), user("end"), assistant("bye")]
    whole = render(tokenizer, chat[:2], generation_prompt=False)
    prompt = render(tokenizer, chat[:1])
    assert whole[: len(prompt)] != prompt  # the newline of the prompt and the answer's would be one token
    rows = supervised_rows(tokenizer, chat)
    assert rows[0].ids[: len(prompt)] == prompt
    assert spoken(tokenizer, rows[0]) == ["\nhello<|im_end|>"]
    assert [spoken(tokenizer, row)[-1] for row in rows] == ["\nhello<|im_end|>", "bye<|im_end|>"]


def test_tool_calls_and_results_pass_through_the_models_own_template():
    tokenizer = toy_tokenizer(QWEN3)
    call = {
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1}'},
    }  # a string, as the OpenAI API has it
    tools = [{"type": "function", "function": {"name": "add"}}]
    chat = [
        {"role": "system", "content": "be brief"}, user("hello"), assistant("", tool_calls=[call]),
        {"role": "tool", "content": "2"}, assistant("two"),
    ]  # fmt: skip
    (row,) = supervised_rows(tokenizer, chat, tools=tools)
    assert spoken(tokenizer, row) == [
        '<think>\n\n</think>\n\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "<think>\n\n</think>\n\ntwo<|im_end|>",
    ]
    text = tokenizer.decode(row.ids, skip_special_tokens=False)
    assert '<tools>{"type": "function"' in text
    assert "<tool_response>\n2\n</tool_response>" in text
    assert row.ids == render(tokenizer, chat, generation_prompt=False, tools=tools)[: len(row.ids)]


def test_end_token_that_only_one_turn_uses_is_supervised():
    template = CHATML.replace("{{ m.content }}<|im_end|>", "{{ m.content }}{{ '<|eom|>' if m.tool_calls else '<|im_end|>' }}")
    tokenizer = toy_tokenizer(template)
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    chat = [user("hello"), assistant("add()", tool_calls=[call]), {"role": "tool", "content": "2"}, assistant("two")]
    (row,) = supervised_rows(tokenizer, chat)
    assert spoken(tokenizer, row) == ["add()<|eom|>", "two<|im_end|>"]


def test_template_without_end_token_supervises_the_content_alone():
    tokenizer = toy_tokenizer(PLAIN)
    (row,) = supervised_rows(tokenizer, CHAT[:2])
    assert spoken(tokenizer, row) == ["hello"]
    assert sample_warnings(row, tokenizer, {tokenizer.eos_token_id}) == ["an answer has no end-of-turn token supervised"]


def test_given_eos_ids_end_a_turn_too():
    tokenizer = toy_tokenizer(PLAIN)
    newline = tokenizer.convert_tokens_to_ids("ĊĊ")
    (row,) = supervised_rows(tokenizer, CHAT[:2], eos_ids={newline})
    assert spoken(tokenizer, row) == ["hello\n\n"]


def test_end_of_turn_ids():
    names = {name: toy_tokenizer(None).convert_tokens_to_ids(name) for name in ("<|im_end|>", "<|eot|>")}
    assert end_of_turn_ids(toy_tokenizer(CHATML)) == {names["<|im_end|>"]}
    assert end_of_turn_ids(toy_tokenizer(PHI)) == {names["<|im_end|>"], names["<|eot|>"]}
    assert end_of_turn_ids(toy_tokenizer(LLAMA3, bos="<s>", eos=None)) == {names["<|eot|>"]}
    assert end_of_turn_ids(toy_tokenizer("{{ raise_exception('no') }}")) == {names["<|im_end|>"]}


def test_opening_greeting_is_context_and_answers_are_required():
    tokenizer = toy_tokenizer(CHATML)
    (row,) = supervised_rows(tokenizer, [assistant("welcome"), user("hello"), assistant("bye")])
    assert spoken(tokenizer, row) == ["bye<|im_end|>"]
    for chat in ([user("hello")], [assistant("welcome")]):
        with pytest.raises(EyasError, match="no assistant turn"):
            supervised_rows(tokenizer, chat)


def test_refusals_are_one_clear_line():
    with pytest.raises(EyasError, match="no chat template"):
        render(toy_tokenizer(None), [user("hello")])
    assert render_text(toy_tokenizer(None), [user("hello")], chat_template="{{ messages[0].content }}") == "hello"
    with pytest.raises(EyasError, match="empty conversation"):
        render(toy_tokenizer(CHATML), [])
    with pytest.raises(EyasError, match="refuses the conversation: roles must alternate"):
        render(toy_tokenizer("{{ raise_exception('roles must alternate') }}"), [user("hello")])
    with pytest.raises(EyasError, match="refuses the conversation"):
        render(toy_tokenizer("{{ 1 + messages[0].content }}"), [user("hello")])
    with pytest.raises(EyasError, match="message 1 holds a part that is not text"):
        render(toy_tokenizer(CHATML), [{"role": "user", "content": [{"type": "image", "url": "x"}]}])
    with pytest.raises(EyasError, match="message 1 calls a tool with arguments that are no JSON"):
        render(toy_tokenizer(CHATML), [assistant("", tool_calls=[{"function": {"name": "f", "arguments": "{"}}])])


def test_text_parts_are_joined_as_servers_join_them():
    parts = {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}]}
    tokenizer = toy_tokenizer(CHATML)
    assert render(tokenizer, [parts]) == render(tokenizer, [user("hello\nyou")])


def test_merge_turns_joins_only_what_continues():
    a, b = Sample("", [1, 2, 3], [(2, 3)]), Sample("", [1, 2, 3, 4, 5], [(4, 5)])
    other = Sample("", [1, 2, 9, 4, 5, 6], [(5, 6)])
    assert merge_turns([a, b]) == [Sample("", [1, 2, 3, 4, 5], [(2, 3), (4, 5)])]
    assert merge_turns([a, b, other]) == [*merge_turns([a, b]), other]
    assert merge_turns([]) == []


def test_random_chats_keep_prompt_and_answer_apart():
    """For any text, white space at its edges included, a row is the server's prompt and then the answer."""
    rng = random.Random(0)
    pieces = ["hello", " ", "\n", "\n\n", " you", "x", "é", "日", ": ", "\t"]
    for _ in range(200):
        chat = []
        for _ in range(rng.randint(1, 3)):
            chat += [user("".join(rng.choices(pieces, k=3))), assistant("".join(rng.choices(pieces, k=3)))]
        for template in (CHATML, PHI):
            tokenizer = toy_tokenizer(template)
            rows = supervised_rows(tokenizer, chat)
            answers = [(row.ids[:a], row.ids[a:b]) for row in rows for a, b in row.spans]
            assert len(answers) == len(chat) // 2
            for turn, (prompt, answer) in enumerate(answers):
                said = chat[2 * turn + 1]["content"]
                assert tokenizer.decode(answer[:-1], skip_special_tokens=False) == said
                assert answer[-1] in end_of_turn_ids(tokenizer)
                assert prompt == render(tokenizer, chat[: 2 * turn + 1])


def test_template_hash_follows_text_and_flags():
    tokenizer = toy_tokenizer(CHATML)
    same = template_hash(toy_tokenizer(CHATML))
    assert template_hash(tokenizer) == same
    assert template_hash(tokenizer, enable_thinking=False) != same
    assert template_hash(toy_tokenizer(CHATML + " ")) != same


def test_parse_flags():
    assert parse_flags(["enable_thinking=false", "n=3", "date=1 May"]) == {
        "enable_thinking": False,
        "n": 3,
        "date": "1 May",
    }
    for wrong in ("thinking", "=1", "a b=1"):
        with pytest.raises(EyasError, match="name=value"):
            parse_flags([wrong])


def test_warnings_and_colours():
    tokenizer = toy_tokenizer(LLAMA3, bos="<s>", eos="<|eot|>")
    ends = {tokenizer.eos_token_id}
    (row,) = supervised_rows(tokenizer, CHAT)
    assert sample_warnings(row, tokenizer, ends) == []
    text = coloured(row, tokenizer, ends)
    assert text.plain == tokenizer.decode(row.ids, skip_special_tokens=False)
    assert [text.plain[s.start : s.end] for s in text.spans if s.style == "green"] == ["hello", "more\n\nhello", "bye"]
    doubled = Sample("", [tokenizer.bos_token_id, *row.ids], [])
    assert sample_warnings(doubled, tokenizer, ends) == ["nothing is supervised", "begins with two BOS tokens"]
    late = Sample("", encode(tokenizer, "hello<s>"), [(0, 2)])
    assert len(sample_warnings(late, tokenizer, ends)) == 3
    cut = Sample("", row.ids[:-1], [(3, len(row.ids) - 1)], finish="length")
    assert sample_warnings(cut, tokenizer, ends) == ["an answer was cut at the limit"]


def test_reasoning_around_a_tool_call_is_kept_as_long_as_the_template_keeps_it():
    """Both thoughts of one question stand in one row; after the next question the template strips them, in a row of its own."""
    tokenizer = toy_tokenizer(QWEN3)
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        {"role": "system", "content": "be brief"}, user("hello"), assistant("", reasoning_content="plan", tool_calls=[call]),
        {"role": "tool", "content": "2"}, assistant("two", reasoning_content="sum"), user("end"),
        assistant("bye", reasoning_content="last"),
    ]  # fmt: skip
    first, second = supervised_rows(tokenizer, chat, id="t")
    assert [text.split("\n")[1] for text in spoken(tokenizer, first)] == ["plan", "sum"]
    assert "<tool_call>" in spoken(tokenizer, first)[0]
    assert spoken(tokenizer, second) == ["<think>\nlast\n</think>\n\nbye<|im_end|>"]
    assert (first.conversation, second.conversation) == ("t", "t")
    unsupervised = tokenizer.decode([i for i, said in zip(first.ids, first.mask(), strict=True) if not said])
    assert "be brief" in unsupervised and "<tool_response>\n2" in unsupervised  # read, not learnt
    asked = tokenizer.decode(second.ids[: second.spans[0][0]])
    assert "plan" not in asked and "<tool_call>" in asked
