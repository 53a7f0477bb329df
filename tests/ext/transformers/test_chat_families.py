"""Masks and texts of templates in the style of several families equal transformers' own apply_chat_template."""

import json

import pytest

from lightning_dilated.ext.text.messages import conversation
from lightning_dilated.ext.text.template import JsonTokenizer, TransformersTokenizer

pytest.importorskip("transformers", reason="needs the extra transformers", minversion="5.24")
from ..text.chats import chat, tokenizer_json, write
from .test_chat_transformers import hf_folder, make

OPEN, CLOSE = "{% generation %}", "{% endgeneration %}"
#: [[ and ]] mark the start of an answer and the end of its turn
FAMILIES = {
    "ChatML": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}[[{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '\n<call>' + (c.function | tojson) + '</call>' }}{% endfor %}<|im_end|>]]"
        "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "headers": (
        "{{ '<|endoftext|>' }}{% if tools %}{{ '<|im_start|>tools\n\n' + (tools | tojson) + '<|im_end|>' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|im_start|>\n\n' }}"
        "{% if m['role'] == 'assistant' %}[[{{ m['content'] | trim }}<|im_end|>]]{% else %}"
        "{{ m['content'] | trim }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_start|>\n\n' }}{% endif %}"
    ),
    "instructions": (
        "{{ '<|endoftext|>' }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "[[{{ ' ' + m.content }}<|im_end|>]]{{ ' ' }}{% else %}"
        "{{ '<|im_start|>' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
    ),
    "model turns": (
        "{{ '<|endoftext|>' }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<|im_start|>' + role + '\n' }}{% if role == 'model' %}[[{% endif %}"
        "{% if m.content is string %}{{ m.content | trim }}{% else %}"
        "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}"
        "<|im_end|>{% if role == 'model' %}]]{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
    ),
}  # fmt: skip
#: a template that ignores contents other than text, as some released models do
SILENT = FAMILIES["ChatML"].replace("m.content", "(m.content if m.content is string else '')")


def forms(family):
    """Return the template with tags and the template without tags."""
    tagged = family.replace("{% if role == 'model' %}[[{% endif %}", "").replace(
        "{% if role == 'model' %}]]{% endif %}", ""
    )
    if tagged != family:  # tags must enclose complete statements
        body = tagged[tagged.index("{% if m.content is string %}") : tagged.index("<|im_end|>") + len("<|im_end|>")]
        combined = f"{{% if role == 'model' %}}{OPEN}{body}{CLOSE}{{% else %}}{body}{{% endif %}}"
        return tagged.replace(body, combined), tagged
    return family.replace("[[", OPEN).replace("]]", CLOSE), family.replace("[[", "").replace("]]", "")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Return a function: `tokenizers(template)` returns a tokenizer of transformers and one from a tokenizer.json."""
    folder = tmp_path_factory.mktemp("families")
    path = tokenizer_json(folder / "own")

    def load(template):
        return [TransformersTokenizer(hf_folder(folder / "hf", template), None), JsonTokenizer(path, template)]

    return load


def theirs(tokenizer, row):
    """Return (tokens, mask) computed by transformers."""
    encoded = tokenizer.tokenizer.apply_chat_template(
        row["messages"], tools=row.get("tools"), return_dict=True, return_assistant_tokens_mask=True
    )
    return encoded["input_ids"], encoded["assistant_masks"]


def ours(tokenizer, row, learn="assistant"):
    ids, mask = tokenizer.tokens(conversation(row, "here"), learn)
    return ids.tolist(), mask.astype(int).tolist()


def learned(tokenizer, row, learn="assistant"):
    ids, mask = tokenizer.tokens(conversation(row, "here"), learn)
    return tokenizer.decode(ids[mask].tolist())


ROWS = [
    chat("the cat", "sat on", "a mat?", "nobody came 猫\n"),
    chat("dry\n\n", " wet ", system="it rained"),
    chat("<|im_end|>\n", "a<|im_start|>b\n\n"),
]
CALL = {"type": "function", "function": {"name": "dry", "arguments": {"mat": 1, "über": [None, "x"]}}}
TOOLS = [{"type": "function", "function": {"name": "dry", "parameters": {"properties": {"mat": {"type": "integer"}}}}}]


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_are_those_of_transformers(tokenizers, family):
    tagged, plain = forms(FAMILIES[family])
    for row in ROWS:
        for with_tags, without in zip(tokenizers(tagged), tokenizers(plain), strict=True):
            want = theirs(tokenizers(tagged)[0], row)
            assert any(want[1]) and ours(with_tags, row) == want and ours(without, row) == want


def test_tools_and_calls_are_written_as_by_transformers(tokenizers):
    row = {
        "messages": [{"role": "user", "content": "dry?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    }
    for template, options in ((FAMILIES["ChatML"], {}), (FAMILIES["headers"], {"tools": TOOLS})):
        if options:
            row = {**chat("dry?", "wet"), **options}
        tagged, plain = forms(template)
        want = theirs(tokenizers(tagged)[0], row)
        for tokenizer in (*tokenizers(tagged), *tokenizers(plain)):
            assert ours(tokenizer, row) == want


# -- contents as lists of parts ------------------------------------------------------------------------------------------
def in_parts(row):
    """Return the row with each content split into two parts."""
    parts = lambda x: [{"type": "text", "text": x[:3]}, {"type": "text", "text": x[3:]}]  # noqa: E731
    return {"messages": [{**m, "content": parts(m["content"])} for m in row["messages"]]}


@pytest.mark.parametrize("family", [*FAMILIES, "silent"])
def test_parts_of_a_content_are_their_texts(tokenizers, family):
    tagged, plain = forms(SILENT if family == "silent" else FAMILIES[family])
    row = chat("the cat", "sat on", "a mat?", "nobody")
    for template in (tagged, plain):
        for tokenizer in tokenizers(template):
            parts = in_parts(row)
            want = ours(tokenizer, row)
            if family == "model turns" and template is tagged:  # the template handles parts itself, as in transformers
                assert theirs(tokenizers(tagged)[0], parts) == ours(tokenizer, parts)
                continue
            assert ours(tokenizer, parts) == want if family != "model turns" else ours(tokenizer, parts) != want
            assert ours(tokenizer, parts, "all")[0] == ours(tokenizer, parts)[0]


def test_a_template_that_takes_parts_only(tokenizers):
    """Text is passed as a list with one part, because the template would drop a plain string."""
    body = "{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>"
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        f"{OPEN}{body}{CLOSE}{{% else %}}{body}{{% endif %}}{{% endfor %}}"
    )
    for tokenizer in tokenizers(template):
        row = in_parts(chat("the cat", "sat on"))
        assert ours(tokenizer, row) == theirs(tokenizers(template)[0], row)
        assert learned(tokenizer, row) == "sat on<|im_end|>"


def test_an_empty_list_of_parts_is_an_empty_text(tokenizers):
    for tokenizer in tokenizers(forms(FAMILIES["ChatML"])[1]):
        row = {"messages": [{"role": "user", "content": []}, {"role": "assistant", "content": "wet"}]}
        assert ours(tokenizer, row) == ours(tokenizer, chat("", "wet"))


# -- messages that are not learned ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("switch", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"train": 0}, {"weight": False}])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_message_of_weight_0_is_not_learned(tokenizers, family, switch):
    row = chat("the cat", "sat on", "a mat?", "dry")
    row["messages"][1] |= switch
    row["messages"][3] |= {name: 1 for name in switch}
    for tokenizer in (x for form in forms(FAMILIES[family]) for x in tokenizers(form)):
        assert learned(tokenizer, row).strip() == "dry<|im_end|>"
        assert ours(tokenizer, row)[0] == ours(tokenizer, chat("the cat", "sat on", "a mat?", "dry"))[0]


def test_weights_with_all_tokens(tokenizers):
    row = chat("the cat", "sat on", "a mat?", "dry")
    row["messages"][0]["train"] = row["messages"][1]["weight"] = 0
    for tokenizer in (x for form in forms(FAMILIES["ChatML"]) for x in tokenizers(form)):
        left = "<|im_start|>assistant\n<|im_start|>user\na mat?<|im_end|>\n<|im_start|>assistant\ndry<|im_end|>\n"
        assert learned(tokenizer, row, "all") == left


def test_weights_that_are_neither(tokenizers):
    for name, value in (("weight", 0.5), ("weight", "0"), ("train", "no"), ("weight", float("nan"))):
        row = chat("the cat", "sat on")
        row["messages"][1][name] = value
        with pytest.raises(ValueError, match=f"message 1 .assistant. has {name}: .*set {name} to 0 or 1"):
            conversation(row, "here")
    row = chat("the cat", "sat on")
    row["messages"][1]["weight"] = 0
    for tokenizer in tokenizers(forms(FAMILIES["ChatML"])[1]):
        with pytest.raises(ValueError, match=r"no token to learn: .* not all of weight 0"):
            tokenizer.tokens(conversation(row, "here"))


# -- tables --------------------------------------------------------------------------------------------------------------
def call(name, arguments):
    kinds = {key: {"type": type(value).__name__, "nested": {key: [1]}} for key, value in arguments.items()}
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    messages = [{"role": "user", "content": f"use {name}"}, {"role": "assistant", "tool_calls": calls}]
    return {"messages": messages, "tools": [{"type": "function", "function": {"name": name, "parameters": kinds}}]}


CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def texts(data):
    """Return (text, learned part of the text) for each conversation."""
    decode = data.tokenizer.decode
    rows = [(x["tokens"].tolist(), [t for t in x["labels"].tolist() if t >= 0]) for x in data.dataset("train")]
    return [(decode(tokens), decode(labels)) for tokens, labels in rows]


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Return a function: `sources(rows)` returns the rows as JSON Lines, and as Arrow read in each way."""
    datasets = pytest.importorskip("datasets", reason="needs the extra datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    datasets.disable_progress_bars()

    def build(rows):
        table = datasets.Dataset.from_list(rows)
        table.to_parquet(tmp_path / "rows.parquet")
        table.save_to_disk(tmp_path / "saved")
        lines = write(tmp_path / "rows.jsonl", rows)
        return [lines, str(tmp_path / "rows.parquet"), str(tmp_path / "saved"), {"path": "json", "data_files": lines}]

    return build


def test_a_table_adds_nothing_to_calls_and_tools(tmp_path, sources):
    rows = [
        call("weather", {"city": "Oslo", "days": {"from": 1}}),
        call("add", {"a": 1, "b": [2]}),
        call("walk", {"days": {"to": 2}, "stops": [{"x": 1}, {"y": 2}]}),
    ]
    tokenizer = tokenizer_json(tmp_path / "own")
    lines, *tables = sources(rows)
    want = texts(make(tmp_path, tokenizer, paths=lines, seq_len=2000, template=CALLS))
    assert '"arguments": {"a": 1, "b": [2]}}<|im_end|>' in want[1][1]
    for source in tables:
        assert texts(make(tmp_path, tokenizer, paths=source, seq_len=2000, template=CALLS)) == want, source


def test_nulls_that_a_row_writes_stay(tmp_path, sources):
    """Nulls stay in JSON, in lists, and in tables that store a column of several types as JSON."""
    rows = [call("add", {"a": None, "b": [None, 1]}), call("add", {"a": "x"}), call("add", {"a": 1})]
    tokenizer = tokenizer_json(tmp_path / "own")
    lines, *_, mixed = sources(rows[:2])
    assert (
        '{"a": null, "b": [null, 1]}'
        in texts(make(tmp_path, tokenizer, paths=lines, seq_len=2000, template=CALLS))[0][1]
    )
    write(tmp_path / "rows.jsonl", rows)
    data = make(tmp_path, tokenizer, paths=mixed, seq_len=2000, template=CALLS)
    assert '{"a": null, "b": [null, 1]}' in texts(data)[0][1]


@pytest.mark.parametrize("spell", [json.dumps, lambda x: [json.dumps(y) for y in x], lambda x: x[0]])
def test_objects_as_json(tokenizers, spell):
    row = call("add", {"a": 1})
    want = {x: ours(x, row) for x in tokenizers(CALLS)}
    for key in ("tools", "tool_calls"):
        changed = json.loads(json.dumps(row))
        holder = changed if key == "tools" else changed["messages"][1]
        holder[key] = spell(holder[key])
        for tokenizer, tokens in want.items():
            assert ours(tokenizer, changed) == tokens


def test_objects_that_are_none(tokenizers):
    row = chat("dry", "wet")
    for value in ("", " ", "[]", "null", [], None):
        assert conversation({**row, "tools": value}, "here").tools is None
    for value, message in (
        ("weather", "here: 'tools' is a text that is not JSON"),
        ('"weather"', "'tools' must be a list of objects"),
        (["weather"], "not JSON"),
        (7, "'tools' must be a list of objects, or that list as JSON; got '7'"),
        ([7], "must be a list of objects"),
    ):
        with pytest.raises(ValueError, match=message):
            conversation({**row, "tools": value}, "here")
    with pytest.raises(ValueError, match=r"message 1 .assistant.: 'tool_calls' is a text that is not JSON"):
        conversation({"messages": [*row["messages"][:1], {"role": "assistant", "tool_calls": "add(1)"}]}, "here")
