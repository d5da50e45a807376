"""Writes down events and actions while an engine trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from infinity.optim.pipeline import UpdatePipeline
from infinity.tiers import GradStore, Params
from infinity.tiers.activations import ActivationStore
from infinity.tiers.copies import Memory, State
from infinity.tiers.unit_params import UnitParams
from infinity.zero.executor import Executor
from infinity.zero.gathering import Gathering
from infinity.zero.in_flight import InFlight
from infinity.zero.speculation import Speculation
from infinity.zero.updates import Updates


class Recorder:
    """A log, one line an event: `event: action, action`."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._lines: list[tuple[str, list[str]]] = [("initialize", [])]

    def name(self, unit: int) -> str:
        return self._names[unit]

    def names(self, units: Any) -> str:
        return " ".join(map(self.name, units))

    def event(self, words: str) -> None:
        self._lines.append((words, []))

    def action(self, words: str) -> None:
        self._lines[-1][1].append(words)

    def text(self) -> str:
        """Of all lines but those of events that nothing was done for and that are no use."""
        kept = [(words, done) for words, done in self._lines if done or not words.startswith(("leave", "gradient"))]
        return "".join(f"{words}: {', '.join(done)}\n" if done else f"{words}\n" for words, done in kept)


Note = Callable[..., str | None]  # the words for a call, given its arguments; None for a call that is not noted


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Whatever engines do inside is written down."""
    with pytest.MonkeyPatch.context() as monkeypatch:

        def watch(kind: Any, method: str, note: Note, add: Callable[[str], None]) -> None:
            original = getattr(kind, method)

            def watched(self: Any, *args: Any, **options: Any) -> Any:
                words = note(self, *args, **options)
                if words is not None:
                    add(words)
                return original(self, *args, **options)

            monkeypatch.setattr(kind, method, watched)

        def after(kind: Any, method: str, note: Note) -> None:
            """Noted if it has done something; its place in the log is where it began."""
            original = getattr(kind, method)

            def watched(self: Any, *args: Any, **options: Any) -> Any:
                result = original(self, *args, **options)
                words = note(self, *args, **options)
                if result is not False and words is not None:
                    recorder.action(words)
                return result

            monkeypatch.setattr(kind, method, watched)

        name, names = recorder.name, recorder.names

        def event(kind: Any, method: str, note: Note) -> None:
            watch(kind, method, note, recorder.event)

        def action(kind: Any, method: str, note: Note) -> None:
            watch(kind, method, note, recorder.action)

        event(Executor, "enter", lambda _, rows: f"enter {names(row.index for row in rows)}" if rows else None)
        event(Executor, "leave", lambda _, rows: f"leave {names(row.index for row in rows)}" if rows else None)
        event(Executor, "begin_cycle", lambda _: "forward")
        event(Executor, "end_cycle", lambda _, learn: "end of pass")
        event(Executor, "drain", lambda _: "drain")
        event(Updates, "begin_backward", lambda _, last, **__: f"backward{', the last' if last else ''}")
        event(Updates, "end_backward", lambda _: "end of backward")
        event(Updates, "finish_step", lambda _: "step")
        event(Updates, "add", lambda _, addend: f"gradient of {name(addend.unit.index)}")

        after(
            Params,
            "fetch_start",
            lambda _, each, *__, **___: (
                None if each.compute_copy.state is State.ABSENT else f"fetch {name(each.index)} ({each.spec.nbytes})"
            ),
        )
        action(Params, "evict", lambda _, each: f"evict {name(each.index)}")
        action(Gathering, "_start", lambda _, row, __: f"gather {name(row.index)}")
        action(UnitParams, "write_home", lambda params: f"write {name(params.index)}")
        action(UpdatePipeline, "submit", lambda _, ticket: _submission(name, ticket))
        action(UpdatePipeline, "_update", lambda _, ticket, tile: f"tile {name(ticket.unit)}/{tile.index}")
        action(UpdatePipeline, "expect", lambda _, units: f"expect {names(units)}" if units else None)
        action(InFlight, "update_on_device", lambda _, row: f"update on the device {name(row.index)}")
        after(UpdatePipeline, "withdraw", lambda _, ticket: f"withdraw {name(ticket.unit)}")
        action(Speculation, "commit", lambda _, row: f"commit {name(row.index)}")
        action(
            Speculation,
            "roll_back",
            lambda _, rows, *__, **___: f"roll back {names(row.index for row in rows)}" if rows else None,
        )
        action(GradStore, "spill", lambda _, each: f"spill {name(each.unit)}")
        action(
            GradStore,
            "_move",
            lambda _, each, source, target, *__: f"read spilled {name(each.unit)}" if target is Memory.HOST else None,
        )
        action(ActivationStore, "_read", lambda _, entry, *__: f"read activation of {entry.nbytes}")
        action(ActivationStore, "_leave_arena", lambda _, entry: f"evict activation of {entry.nbytes}")
        yield


def _submission(name: Callable[[int], str], ticket: Any) -> str:
    tiles = "" if ticket.only is None else f" tiles {min(ticket.only, default='-')}-{max(ticket.only, default='-')}"
    return (
        f"submit {name(ticket.unit)} ({ticket.grad.nbytes}){tiles}{', written' if ticket.write else ''}"
        f"{', needed ' + str(ticket.next_use) if ticket.next_use >= 0 else ', needed now'}"
        f"{', may be undone' if ticket.before or ticket.reconstructs_grads or ticket.reconstructs_param else ''}"
    )
