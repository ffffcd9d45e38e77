"""Workloads by name and from files: what is in them, and what is said of a file that is none."""

import gzip
import random
from itertools import pairwise
from pathlib import Path

import pytest

from biphase.client.prompts import PromptMaker
from biphase.client.workload_file import Item
from biphase.client.workloads import SHAPES, TRACES, describe, find_workload
from biphase.errors import BadInput


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_one_length_of_prompt_and_answer(name: str) -> None:
    workload = find_workload(name)
    assert [(item.input_tokens, item.output_tokens) for item in workload.items] == [SHAPES[name][:2]]
    assert not workload.timed
    assert not workload.shares


@pytest.mark.parametrize(
    ("name", "requests", "inputs", "outputs", "seconds"),
    [("azure-conv", 19366, 1154.7, 211.1, 3501.7), ("azure-code", 8819, 2047.8, 27.9, 3435.9)],
)
def test_azure_traces_have_the_published_means(
    name: str, requests: int, inputs: float, outputs: float, seconds: float
) -> None:
    """Means and length of the hour as published with the Splitwise paper's data: 1155/211 and 2048/28."""
    workload = find_workload(name)
    figures = describe(workload)
    assert figures.requests == requests
    assert figures.mean_input_tokens == pytest.approx(inputs, abs=0.1)
    assert figures.mean_output_tokens == pytest.approx(outputs, abs=0.1)
    assert workload.items[0].at_s == 0.0
    assert workload.items[-1].at_s == pytest.approx(seconds, abs=0.1)
    assert "CC-BY-4.0" in workload.source


def test_mooncake_shares_prefixes() -> None:
    workload = find_workload("mooncake")
    assert len(workload.items) == 1000
    assert workload.shares
    assert all(len(item.blocks) == -(-item.input_tokens // 512) for item in workload.items)


def _longest_known_prefix(prompt: list[int], seen: set[tuple[int, ...]], step: int) -> int:
    """Tokens of the prompt's head that an endless cache of whole blocks holds; adds the prompt's own blocks."""
    known, found = True, 0
    for end in range(step, len(prompt) + 1, step):
        head = tuple(prompt[:end])
        known = known and head in seen
        found = end if known else found
        seen.add(head)
    return found


def test_prompts_of_mooncake_share_block_by_block_what_the_trace_shares() -> None:
    """An endless cache of 512-token blocks hits on the prompts' tokens exactly where it hits on the trace's ids."""
    workload = find_workload("mooncake")
    items = [item for item in workload.items if item.input_tokens < 9000][:150]
    maker = PromptMaker(range(1000, 9000), rng=random.Random(1))
    by_ids: set[tuple[int, ...]] = set()
    by_tokens: set[tuple[int, ...]] = set()
    hits = 0
    for item in items:
        prompt = maker.make_of_blocks(item.input_tokens, item.blocks, workload.block_tokens).content
        assert isinstance(prompt, list)
        assert len(prompt) == item.input_tokens
        whole = item.input_tokens // 512  # the last block is partial: no cache of blocks holds it
        expected = 512 * _longest_known_prefix(list(item.blocks[:whole]), by_ids, 1)
        assert _longest_known_prefix(prompt, by_tokens, 512) == expected
        hits += expected
    assert hits > 10_000  # the trace does share


def test_blocks_are_others_in_another_run() -> None:
    first, second = (PromptMaker(range(1000, 9000)).make_of_blocks(512, (7,), 512).content for _ in range(2))
    assert first != second


def test_a_block_prompt_counts_what_the_server_adds() -> None:
    maker = PromptMaker(["one", "two", "three"], overhead=5)
    prompt = maker.make_of_blocks(20, ("a",), 16)
    assert prompt.tokens == 20
    assert isinstance(prompt.content, str)
    assert len(prompt.content.split()) == 15


OWN = '{"input_tokens": 10, "output_tokens": 2}\n{"input_tokens": 20, "output_tokens": 3}\n'
TIMED = '{"input_tokens": 10, "output_tokens": 2, "at_s": 1.5}\n\n{"input_tokens": 20, "output_tokens": 3, "at_s": 4}\n'
MOONCAKE = '{"timestamp": 500, "input_length": 600, "output_length": 6, "hash_ids": [4, 9]}\n'
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
BLOCKS = '{"block_tokens": 16}\n{"input_tokens": 40, "output_tokens": 2, "blocks": [0, 5, 6]}\n'


@pytest.mark.parametrize(
    ("text", "items"),
    [
        (OWN, [Item(10, 2), Item(20, 3)]),
        (TIMED, [Item(10, 2, 1.5), Item(20, 3, 4.0)]),
        (MOONCAKE, [Item(600, 6, 0.5, (4, 9))]),
        (AZURE, [Item(374, 44, 0.0), Item(396, 109, 4.314579)]),
        (BLOCKS, [Item(40, 2, None, (0, 5, 6))]),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_files_of_each_format_plain_and_packed(text: str, items: list[Item], packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "w"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    workload = find_workload(str(path))
    assert [item.input_tokens for item in workload.items] == [item.input_tokens for item in items]
    assert [item.blocks for item in workload.items] == [item.blocks for item in items]
    for found, item in zip(workload.items, items, strict=True):
        assert found.at_s == (None if item.at_s is None else pytest.approx(item.at_s, abs=1e-6))
    assert workload.block_tokens == (16 if text is BLOCKS else 512)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no request"),
        ("hello\n", "line 1"),
        ('{"input_tokens": 10}\n', "output_tokens"),
        ('{"input_tokens": 10, "output_tokens": 2, "more": 1}\n', "unknown field `more`"),
        ('{"input_tokens": 0, "output_tokens": 2}\n', "request 1: 0 tokens in"),
        (OWN + '{"input_tokens": 10, "output_tokens": 2, "at_s": 1}\n', "request 3: some requests have a time"),
        (
            '{"input_tokens": 9, "output_tokens": 2, "at_s": 2}\n{"input_tokens": 9, "output_tokens": 2, "at_s": 1}',
            "2 s",
        ),
        ('{"input_tokens": 500, "output_tokens": 2, "blocks": [1, 2]}\n', "2 blocks of 512 tokens"),
        ('{"block_tokens": 0}\n{"input_tokens": 500, "output_tokens": 2}\n', "block_tokens 0"),
        ('{"timestamp": 0, "input_length": -4, "output_length": 6}\n', "-4 tokens in"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", "line 2: 'yesterday,1,1'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no request"),
    ],
)
def test_a_file_that_is_none_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        find_workload(str(path))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_neither_a_name_nor_a_file_lists_the_names(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        find_workload("chatt")
    assert all(name in str(caught.value) for name in (*SHAPES, *TRACES))
    with pytest.raises(BadInput, match="Is a directory"):
        find_workload(str(tmp_path))
    (tmp_path / "x").write_bytes(b"\x1f\x8b broken")
    with pytest.raises(BadInput, match="neither text nor gzip"):
        find_workload(str(tmp_path / "x"))


def test_trace_times_rise() -> None:
    for name in TRACES:
        items = find_workload(name).items
        assert all((a.at_s or 0.0) <= (b.at_s or 0.0) for a, b in pairwise(items))
