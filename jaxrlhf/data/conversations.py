"""Chat tables for supervised fine-tuning: conversations, checked and tokenised.

A row of a .parquet or .jsonl file has one of these forms (whatever else it holds is kept):

  messages                         a whole conversation: ``{"role": str, "content": str}`` each
  prompt (or messages), response   what is read, and what the assistant says to it

where ``response`` may be called ``completion``. Both of the second form are messages (TRL's), or
the prompt is messages and the response a text, or both are texts: those are tokenised as they are,
without a chat template. Rows are counted from 0 in messages.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrlhf.data.chat import Example, encode_conversation, encode_example
from jaxrlhf.data.prompts import OVERLONG, PromptDataset
from jaxrlhf.data.tables import (
    PathLike,
    Record,
    TableError,
    check_chat_template,
    check_prompt,
    check_text,
    encoding,
    plain_values,
    read_rows,
    where,
)

ANSWERS = ("response", "completion")


def read_conversations(path: PathLike) -> list[Record]:
    """Reads a chat table and checks every row; see the module's docstring.

    Raises:
      TableError: the file is missing, unreadable or empty, or a row has none of the forms; names
        the file, the row and the key.
    """
    return [check_conversation(row, where(path, i)) for i, row in enumerate(read_rows(path))]


def check_conversation(record: Mapping[str, Any], place: str) -> Record:
    """Brings one row into one form, or says what is wrong with it.

    Args:
      record: one row.
      place: how messages name the row, such as ``chats.jsonl: row 3``.

    Returns:
      The row with ``messages`` (a whole conversation) and ``context``, the number of messages at
      its beginning that are only read; or, of plain texts, with ``prompt`` and ``response``.

    Raises:
      TableError: names the place and the key.
    """
    row = plain_values(record)
    given = [key for key in ("messages", "prompt", *ANSWERS) if row.get(key) is not None]
    answers = [key for key in given if key in ANSWERS]
    if not answers:
        if "messages" not in given:
            held = ", ".join(row) or "nothing"
            raise TableError(
                f"{place}: messages is missing (the row has {held}); give messages, or prompt with "
                "response or completion."
            )
        return row | _conversation(check_prompt(row["messages"], f"{place}: messages"), 0, place)
    prompts = [key for key in given if key not in ANSWERS]
    if len(answers) > 1 or len(prompts) != 1:
        raise TableError(
            f"{place}: {' and '.join(given)} are given; keep messages alone, or one prompt with "
            "one response."
        )
    prompt = check_prompt(row[prompts[0]], f"{place}: {prompts[0]}")
    answer = check_prompt(row[answers[0]], f"{place}: {answers[0]}")
    if isinstance(prompt, str) and isinstance(answer, str):
        return {k: v for k, v in row.items() if k not in given} | {
            "prompt": prompt,
            "response": answer,
        }
    if isinstance(prompt, str):
        raise TableError(
            f"{place}: {prompts[0]} is a text and {answers[0]} are messages; make both alike."
        )
    said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
    return row | _conversation([*prompt, *said], len(prompt), place)


def _conversation(messages: Any, context: int, place: str) -> Record:
    if isinstance(messages, str):
        raise TableError(f"{place}: messages is a string; make it a list of messages.")
    said = [i for i in range(context, len(messages)) if messages[i]["role"] == "assistant"]
    if not said:
        roles = ", ".join(message["role"] for message in messages[context:])
        raise TableError(
            f"{place}: messages has no turn of the assistant to train on (its roles are {roles}); "
            "add one or remove the row."
        )
    for i in said:
        if messages[i].keys() <= {"role", "content"}:  # no call of a tool, say, in its place
            check_text(messages[i]["content"], f"{place}: messages[{i}].content")
    return {"messages": messages, "context": context}


@dataclass(frozen=True)
class ConversationDataset:
    """Records and their tokens; entry ``i`` is the conversation with id ``i``.

    Attributes:
      records: the rows that are used, as ``check_conversation`` returns them.
      examples: their tokens, and which of them are trained on.
      rows: where each stood in the table that it came from.
      filtered: how many rows were left out because they were too long.
      truncated: how many lost their end.
      source: the table's file, for messages.
    """

    records: list[Record]
    examples: list[Example]
    rows: list[int]
    filtered: int = 0
    truncated: int = 0
    source: PathLike = "records"

    def __len__(self) -> int:
        return len(self.records)

    def place(self, example_id: int) -> str:
        """Where a conversation's record stands, for messages."""
        return where(self.source, self.rows[example_id])

    def as_prompts(self) -> PromptDataset:
        """Each conversation as one entry of all of its tokens: what fingerprints take."""
        ids = [example.tokens.tolist() for example in self.examples]
        return PromptDataset(self.records, ids, self.rows, source=self.source)


def tokenize_conversations(
    records: Sequence[Record],
    tokenizer: Any,
    *,
    max_length: int,
    overlong: str = "filter",
    turns: str = "all",
    source: PathLike = "records",
    stop_ids: Collection[int] | None = None,
    template_options: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> ConversationDataset:
    """Tokenises every conversation once.

    Args:
      records: from ``read_conversations``.
      tokenizer: from ``load_tokenizer``.
      max_length: in tokens, those of the template included.
      overlong: what to do with a longer one. "filter" leaves it out; "truncate" keeps the first
        ``max_length`` tokens, and leaves it out where none of them is trained on; "error" refuses
        it.
      turns: as in ``encode_conversation``.
      source: the records' file, for messages.
      stop_ids, template_options: as in ``encode_example``.
      on_progress: called with (conversations done, conversations in all).

    Raises:
      ValueError: a too long conversation under "error", or none is left.
      TableError: one that the template or the tokenizer does not take; names file and row.
    """
    if overlong not in OVERLONG:
        raise ValueError(f"overlong={overlong!r} is unknown; use one of {', '.join(OVERLONG)}.")
    kept: list[tuple[int, Example]] = []
    truncated = 0
    for row, record in enumerate(records):
        place = where(source, row)
        example = _encode(tokenizer, record, turns, stop_ids, template_options, place)
        is_long = len(example.tokens) > max_length
        if is_long and overlong == "error":
            raise ValueError(
                f"{place}: the conversation has {len(example.tokens)} tokens; raise max_length "
                f"(now {max_length}) or set overlong to filter or truncate."
            )
        cut = Example(example.tokens[:max_length], example.answer_mask[:max_length])
        if not is_long or (overlong == "truncate" and cut.answer_mask.any()):
            kept.append((row, cut))
            truncated += is_long
        if on_progress is not None:
            on_progress(row + 1, len(records))
    if not kept:
        raise ValueError(
            f"{source}: no conversation of {len(records)} fits max_length {max_length}; raise it."
        )
    return ConversationDataset(
        records=[records[row] for row, _ in kept],
        examples=[example for _, example in kept],
        rows=[row for row, _ in kept],
        filtered=len(records) - len(kept),
        truncated=truncated,
        source=source,
    )


def _encode(
    tokenizer: Any,
    record: Record,
    turns: str,
    stop_ids: Collection[int] | None,
    options: Mapping[str, Any] | None,
    place: str,
) -> Example:
    if "messages" in record:
        check_chat_template(tokenizer, place, "rows")
    with encoding(place, "the conversation"):
        example = _encode_record(tokenizer, record, turns, stop_ids, options)
    if example.answer_mask[0]:
        raise TableError(
            f"{place}: its first token is the assistant's, and nothing predicts that one; give it "
            "a prompt, or a tokenizer that puts a token before it."
        )
    return example


def _encode_record(
    tokenizer: Any,
    record: Record,
    turns: str,
    stop_ids: Collection[int] | None,
    options: Mapping[str, Any] | None,
) -> Example:
    if "messages" not in record:
        return encode_example(tokenizer, record["prompt"], record["response"])
    return encode_conversation(
        tokenizer,
        record["messages"],
        turns=turns,
        context=record["context"],
        stop_ids=stop_ids,
        template_options=options,
    )
