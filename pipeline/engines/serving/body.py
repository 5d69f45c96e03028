"""The body of a request: its JSON, our fields in it, and the errors that answer it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

FIELDS = (
    "return_attention_tokens", "top_k_attention", "attention_sketch_mode",
    "attention_fingerprint_mode", "attention_capture_layers", "attention_capture_head_ids",
    "attention_mask_prefix", "include_prompt_attention", "attention_hubs",
    "attention_moe_routing", "attention_logit_lens", "attn_capture", "attn_capture_layers",
    "return_prompt_tokens",
)  # fmt: skip
# Fields that ask; the others say how.
ASKING = ("return_attention_tokens", "attn_capture")


class RequestError(Exception):
    """A request that is not answered; HTTP 400 unless it says otherwise.

    Args:
        message: what is wrong and what to do, in a line.
        param: the field that is wrong.
    """

    def __init__(
        self, message: str, param: str | None, *, status: int = 400, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code


class Repeated(dict[str, Any]):
    """A JSON object in which a field of `FIELDS` stood more than once: `name`."""

    name = ""


def read_body(raw: bytes) -> Any:
    """The JSON value of a body. RequestError: it has none."""
    try:
        return json.loads(raw, object_pairs_hook=_object)
    except RecursionError:
        raise RequestError("the body is nested too deeply", None) from None
    except ValueError as error:  # among them: no UTF-8, a number of 5,000 digits
        reason = str(error).splitlines()[0][:100]
        raise RequestError(f"the body is not JSON: {reason}", None) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) == len(pairs):
        return made
    names = [name for name, _ in pairs]
    for name in FIELDS:
        if names.count(name) > 1:
            made = Repeated(made)
            made.name = name
            return made
    return made


def asked_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Our fields of a body, those of an `extra_body` that was sent as such too, without null.

    Raises:
        RequestError: a field stands twice.
    """
    found: dict[str, Any] = {}
    for place in (body, body.get("extra_body")):
        if not isinstance(place, dict):
            continue
        if isinstance(place, Repeated):
            raise RequestError(f"{place.name} stands twice in the body: give it once", place.name)
        for name in FIELDS:
            if place.get(name) is None:
                continue
            if name in found:
                raise RequestError(f"{name} stands in the body and in extra_body", name)
            found[name] = place[name]
    return found


def asks(fields: Mapping[str, Any]) -> bool:
    """Whether `asked_fields` ask for attention, rightly or wrongly. What says how, without what
    asks, is a mistake; after an explicit no it is not."""
    asking = [fields[name] for name in ASKING if name in fields]
    if asking:
        return not all(is_no(value) for value in asking)
    return not all(is_no(value) for value in fields.values())


def is_no(value: object) -> bool:
    return value is False or (type(value) is int and value == 0)


def without_fields(body: dict[str, Any]) -> dict[str, Any]:
    """A copy of a body without our fields."""
    kept = {name: value for name, value in body.items() if name not in FIELDS}
    extra = kept.get("extra_body")
    if isinstance(extra, dict) and not extra.keys().isdisjoint(FIELDS):
        kept["extra_body"] = {name: extra[name] for name in extra if name not in FIELDS}
        if not kept["extra_body"]:
            del kept["extra_body"]
    return kept


def check_one_choice(body: dict[str, Any]) -> None:
    """RequestError if a request would be answered by several sequences: rows are of one."""
    params = body.get("sampling_params")
    places = {"": body, "sampling_params.": params}
    for where, place in places.items():
        if not isinstance(place, dict):
            continue
        for name in ("n", "best_of", "beam_width"):
            if place.get(name) not in (None, 1, "1"):
                raise RequestError(
                    f"attention is captured of one choice: {where}{name} must be 1", where + name
                )
    if isinstance(params, list):
        raise RequestError("attention is captured of one prompt in a request", "sampling_params")
    if body.get("use_beam_search"):
        raise RequestError("attention is not captured of beams", "use_beam_search")
    for name in ("prompt", "text", "input_ids"):
        given = body.get(name)
        if isinstance(given, list) and len(given) > 1 and isinstance(given[0], str | list):
            raise RequestError("attention is captured of one prompt in a request", name)
