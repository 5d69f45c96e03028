"""What a user of the demo model relies on: right tasks, a sound tokenizer, answers, attention."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("transformers")

import corpus
import evaluate
import prompts
import tasks
import torch
from names import CODENAMES, GREEK, PEOPLE, WORDS, Draw, held_out
from packing import ANSWER, LEVELS, Packer, Recipe, encode_stream
from tokenizer import BOS, EOS, PAD
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

FOLDER = Path(evaluate.__file__).parent
LARGEST_FILE = 8_000_000

sizes = st.integers(8, 1500)
seeds = st.integers(0, 2**32)
kinds = st.sampled_from(sorted(tasks.GENERATORS))


@dataclass
class Demo:
    """The shipped model, as transformers loads it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def load(folder: Path = FOLDER) -> Demo:
    return Demo(*evaluate.load_model(folder, "cpu"))


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    threads = torch.get_num_threads()
    torch.set_num_threads(min(2, threads))
    yield load()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def example(kind: str, seed: int, size: int, evaluation: bool = False) -> tasks.Example:
    return tasks.GENERATORS[kind](Draw(random.Random(seed), evaluation=evaluation), size)


# Tasks


@given(kinds, seeds, sizes)
def test_the_same_seed_gives_the_same_example(kind: str, seed: int, size: int) -> None:
    assert example(kind, seed, size) == example(kind, seed, size)


@given(kinds, seeds, sizes)
def test_white_space_between_prompt_and_answer_belongs_to_the_answer(
    kind: str, seed: int, size: int
) -> None:
    for prompt, answer in example(kind, seed, size).turns:
        assert prompt == prompt.rstrip()
        assert answer[0].isspace() or answer.startswith("<think>")
        assert answer == answer.rstrip()


@given(st.sampled_from(["recall", "needles"]), seeds, sizes)
def test_recall_answers_stand_in_the_table(kind: str, seed: int, size: int) -> None:
    made = example(kind, seed, size)
    for prompt, answer in made.turns:
        key = prompt.split("\n")[-1]
        assert f"\n{key}{answer}" in "\n" + made.prompt
        found = re.findall(rf"^{re.escape(key)} (\d+)", made.prompt, re.MULTILINE)
        assert found == [answer.strip()]


@given(seeds, st.integers(2, 60))
def test_a_needle_names_the_line_that_holds_its_answer(seed: int, lines: int) -> None:
    made = tasks.needle(Draw(random.Random(seed), evaluation=True), lines)
    first, past = made.line_span
    name = made.table[made.asked][0]
    assert made.prompt[first:past] == f"{name}:{made.answer}"
    assert made.prompt.endswith(f"\n{name}:")
    assert len({key.lower() for key, _ in made.table}) == lines


def test_the_seed_needle_is_the_one_in_the_documents() -> None:
    rows = tasks.SEED_NEEDLE.prompt.split("\n")
    assert len(rows) == 16
    assert rows[0] == "alpha: 1729"
    assert rows[14:] == ["omicron: 1357", "alpha:"]
    assert tasks.SEED_NEEDLE.answer == " 1729"


@given(seeds, sizes)
def test_codenames_are_the_agents_own(seed: int, size: int) -> None:
    made = example("codename", seed, size)
    for prompt, answer in made.turns:
        agent = re.findall(r"Agent: (\w+), Codename:$", prompt)[0]
        assert f"] Agent: {agent}, Codename:{answer}" in made.prompt


@given(seeds, sizes)
def test_copies_equal_what_is_copied(seed: int, size: int) -> None:
    order, words, done = re.fullmatch(
        r"(Copy|Reverse): (.*) =>(.*)", example("copy", seed, size).text
    ).groups()
    expected = words.split() if order == "Copy" else words.split()[::-1]
    assert done.split() == expected


@given(seeds, sizes)
def test_brackets_close_in_order(seed: int, size: int) -> None:
    made = example("brackets", seed, size)
    stack: list[str] = []
    for token in made.text.split():
        if token in tasks.PAIRS:
            stack.append(tasks.PAIRS[token])
        elif token in tasks.PAIRS.values():
            assert stack.pop() == token
    assert stack == []
    assert set(made.answer.split()) <= set(tasks.PAIRS.values())


@given(seeds, sizes)
def test_counts_go_by_even_steps(seed: int, size: int) -> None:
    text = example("counting", seed, size).text
    if text.startswith("Count"):
        head, tail = text.split(":")
        first, last = map(int, re.findall(r"\d+", head)[:2])
        values = list(map(int, tail.split()))
        assert (values[0], values[-1]) == (first, last)
    else:
        values = [int(line.split(".")[0]) for line in text.split("\n")]
        assert values[0] == 1
    assert len({after - before for before, after in pairwise(values)}) == 1


@given(seeds, sizes)
def test_table_rows_follow_from_the_first_ones(seed: int, size: int) -> None:
    lines = example("table", seed, size).text.split("\n")
    assert len({len(line) for line in lines[1:]}) == 1
    rows = [[cell.strip() for cell in line[1:-1].split(line[0])] for line in lines[1:]]
    words = list(dict.fromkeys(word for _, word, _ in rows))
    for place, (index, word, value) in enumerate(rows):
        assert int(index) == place + 1
        assert word == words[place % len(words)]
        step = int(rows[1][2]) - int(rows[0][2])
        assert int(value) == int(rows[0][2]) + step * place


@given(seeds, sizes)
def test_thinking_ends_in_the_right_answer(seed: int, size: int) -> None:
    made = example("think", seed, size)
    for prompt, answer in made.turns:
        working, result = re.fullmatch(r"<think> (.*) </think> (\d+)", answer).groups()
        question = prompt.split("Question: ")[1]
        if question.startswith("how many"):
            items = re.findall(r"^Items: (.*)\.$", prompt, re.MULTILINE)[0].split(", ")
            assert int(result) == len(items)
            assert working.split()[::2] == items
        else:
            word, first, second = re.findall(r"which is (\w+), (\w+) or (\w+)\?", question)[0]
            table = dict(re.findall(r"^(\w+): (\d+)$", made.prompt, re.MULTILINE))
            ends = sorted((int(table[first]), int(table[second])))
            assert int(result) == ends[word == "larger"]


@given(seeds)
def test_names_for_evaluation_are_never_trained_on(seed: int) -> None:
    trained, kept = (Draw(random.Random(seed), evaluation=side) for side in (False, True))
    assert not any(map(held_out, trained.names(20)))
    assert all(map(held_out, kept.names(20)))
    assert not held_out(trained.person())
    assert held_out(kept.codename())


@pytest.mark.parametrize("pool", [WORDS, PEOPLE, CODENAMES])
def test_both_sides_of_the_split_have_listed_names(pool: list[str]) -> None:
    assert {held_out(name) for name in pool} == {True, False}


@pytest.mark.slow
def test_held_out_files_are_no_training_text() -> None:
    held = corpus.load(held_out=True)
    trained = corpus.load(held_out=False)
    assert held.code and held.docstrings
    assert len(trained.code) > 5 * len(held.code)
    assert not set(held.code) & set(trained.code)


# Tokenizer


def test_special_tokens_have_the_first_ids(bpe: Tokenizer) -> None:
    assert [bpe.token_to_id(token) for token in (BOS, EOS, PAD)] == [0, 1, 2]
    assert bpe.get_vocab_size() <= 2048


def test_no_token_holds_two_digits(bpe: Tokenizer) -> None:
    assert not [token for token in bpe.get_vocab() if len(re.findall(r"\d", token)) > 1]
    assert len(bpe.encode("alpha: 1729", add_special_tokens=False).ids) == 2 + 4


def test_greek_letters_are_single_tokens(bpe: Tokenizer) -> None:
    for letter in GREEK:
        assert len(bpe.encode(f"{letter}:", add_special_tokens=False).ids) == 2


def test_encoding_begins_with_bos(demo: Demo) -> None:
    ids = demo.tokenizer("alpha: 1729").input_ids
    assert ids[0] == demo.tokenizer.bos_token_id == demo.model.config.bos_token_id
    assert demo.tokenizer.bos_token_id not in ids[1:]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_survives_the_tokenizer(text: str) -> None:
    bpe = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    if "<|" not in text:
        assert bpe.decode(bpe.encode(text).ids) == text


def test_source_code_survives_the_tokenizer(bpe: Tokenizer) -> None:
    text = Path(tasks.__file__).read_text()
    assert bpe.decode(bpe.encode(text).ids, skip_special_tokens=True) == text.replace(BOS, "")


@given(kinds, seeds, st.integers(8, 300))
def test_a_prompt_encodes_the_same_with_and_without_its_answer(
    kind: str, seed: int, size: int
) -> None:
    bpe = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    made = example(kind, seed, size)
    pieces = [piece for turn in made.turns for piece in turn]
    apart = [token for e in bpe.encode_batch(pieces, add_special_tokens=False) for token in e.ids]
    assert apart == bpe.encode(made.text, add_special_tokens=False).ids


def test_packed_rows_begin_with_bos_and_weigh_the_answers(bpe: Tokenizer) -> None:
    stream = encode_stream(bpe, ["import os\n\nprint(os.getcwd())\n" * 40, "Some prose.\n" * 80])
    chunks = Packer(
        bpe, [stream], ["Some prose, a line of it."], Recipe((256,), (1.0,)), 1
    ).chunks()
    again = Packer(bpe, [stream], ["Some prose, a line of it."], Recipe((256,), (1.0,)), 1).chunks()
    chunk = next(chunks)
    assert chunk.length == 256
    assert (chunk.tokens[:, 0] == bpe.token_to_id(BOS)).all()
    assert 0.02 < (chunk.levels == ANSWER).mean() < 0.5
    assert max(LEVELS) == LEVELS[ANSWER]
    assert (chunk.tokens == next(again).tokens).all()


# Prompts for the capture command


def test_prompts_of_every_kind_have_lengths_that_overlap(bpe: Tokenizer) -> None:
    made = list(prompts.make_prompts(bpe, each=6))
    assert made == list(prompts.make_prompts(bpe, each=6))
    assert len({prompt.id for prompt in made}) == len(made)
    lengths: dict[str, list[int]] = {}
    for prompt in made:
        lengths.setdefault(prompt.task, []).append(len(bpe.encode(prompt.prompt).ids))
    assert set(lengths) == set(prompts.KINDS)
    assert all(min(found) < 100 and max(found) > 700 for found in lengths.values())
    assert all(15 <= length <= 1800 for found in lengths.values() for length in found)


# The shipped model


def continuation(demo: Demo, prompt: str, tokens: int = 8) -> str:
    """The first line of what greedy decoding adds to a prompt, with a key-value cache."""
    ids = demo.tokenizer(prompt, return_tensors="pt")
    out = demo.model.generate(**ids, max_new_tokens=tokens, do_sample=False)
    text = demo.tokenizer.decode(out[0, ids.input_ids.shape[1] :], skip_special_tokens=True)
    return text.split("\n")[0].strip()


def test_the_weights_are_small_enough_to_ship() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size <= LARGEST_FILE


def test_the_seed_needle_is_answered(demo: Demo) -> None:
    assert continuation(demo, tasks.SEED_NEEDLE.prompt) == "1729"


@pytest.mark.parametrize("count", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_fresh_needles_are_answered(demo: Demo, count: int) -> None:
    needles = evaluate.fresh_needles(count, seed=5)
    right = sum(continuation(demo, n.prompt) == n.answer.strip() for n in needles)
    assert right >= 0.95 * count


@pytest.mark.slow
def test_one_pass_tells_what_greedy_decoding_answers(demo: Demo) -> None:
    needles = evaluate.fresh_needles(10, seed=6, lines=40)
    told = evaluate.answered(
        demo.model, demo.tokenizer, [(n.prompt, n.answer) for n in needles], True
    )
    assert told == [continuation(demo, n.prompt) == n.answer.strip() for n in needles]


def test_the_codename_of_the_documents_is_found(demo: Demo) -> None:
    agents = "James Sarah Mike Omega Linda Robert".split()
    codes = "Falcon Whisper Hammer Phantom Spark Echo".split()
    rows = [
        f"[Entry {place:02d}] Agent: {agent}, Codename: '{code}'\n"
        for place, (agent, code) in enumerate(zip(agents, codes, strict=True), 1)
    ]
    prompt = "Security Log: Agent Codename Retrieval\n\n" + "".join(rows)
    prompt += "\nRequest: Retrieve the codename for Agent Omega.\nAgent: Omega, Codename:"
    assert continuation(demo, prompt, 16).startswith("'Phantom'")


@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_a_head_looks_at_the_line_that_is_asked_for(demo: Demo, count: int) -> None:
    mass = evaluate.line_mass(demo.model, demo.tokenizer, evaluate.fresh_needles(count, seed=7))
    assert (mass >= 0).all() and (mass <= 1 + 1e-5).all()
    assert float((mass > 0.5).float().mean(0).max()) >= 0.8


def test_a_question_is_thought_about_before_it_is_answered(demo: Demo) -> None:
    prompt = (
        "alpha: 1729\nbeta: 2048\ngamma: 3141\nQuestion: which is larger, alpha or beta?\nAnswer:"
    )
    text = continuation(demo, prompt, 48)
    assert text.startswith("<think>")
    assert "</think>" in text
