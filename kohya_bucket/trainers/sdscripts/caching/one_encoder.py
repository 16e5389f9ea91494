"""A text encoder runs on the thread that caches, and what it has made is saved on others meanwhile.

A strategy does both in one method. That runs on a thread of its own, but for what it asks of its encoding strategy: the
caching thread does this, which alone has what belongs to a thread (autocast, the device, its stream), and is the one
that an interrupt ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import local
from typing import Any

from kohya_bucket.latents.encode.worker import Background
from kohya_bucket.trainers.sdscripts.caching.session import replaced

_SECONDS = 0.2  # after which a thread looks whether the run has ended


@dataclass
class _Call:
    """What a strategy asks for on its thread; the caching thread puts the `outputs`."""

    run: Callable[[], Any]
    with_grad: bool
    outputs: SimpleQueue[Any] = field(default_factory=SimpleQueue)


class OneEncoder:
    """The batches of one caching call; to be used as `with encoder.running()`.

    Args:
        threads: how many batches are under way at most: one is encoded, one tokenized, the others are saved.

    Attributes:
        busy: seconds that the encoder ran.
        stopped: the run ends half-way, so nothing more is begun.
    """

    def __init__(self, threads: int) -> None:
        self.busy, self.stopped = 0.0, False
        self._others = Background(lambda work: work(), threads)
        self._patches = ExitStack()
        self._encoding: Any = None
        self._thread = local()  # `asked`, until its one call is there
        self._asked: Future[_Call | None] | None = None  # that of the batch that is to be encoded next
        self._calls = list[tuple[bool, ...]]()  # of the encoder, with what was set then
        self._is_inside, self._asks_once = False, False

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is given to `encode` meanwhile is kept at the end of the block, or what is encoded where that raises."""
        with self._patches, self._others:
            try:
                yield
                self._answer(self._asked)
            except BaseException:
                self.stopped = True
                raise

    def encode(self, encoding: Any, make: Callable[[], None], keep: Callable[[], None]) -> None:
        """Encode a batch with `make`, which uses the strategy `encoding`, and then `keep` it.

        A strategy's first batch is made on the caching thread as a whole. That shows whether it asks for outputs once,
        and under no other autocast; where not, all others are made so too.
        """
        if self._encoding is None and encoding is not None:
            self._encoding = encoding
            names = [name for name in dir(encoding) if name.startswith("encode_tokens")]
            methods: dict[str, Callable[..., Any]] = {
                name: partial(self._on_caching_thread, getattr(encoding, name)) for name in names
            }
            self._patches.enter_context(replaced(encoding, methods))
        if not self._asks_once:
            self._make_here(make)
            self._others.put(keep)
            return
        asked: Future[_Call | None] = Future()

        def work() -> None:
            self._thread.asked = asked
            make()
            keep()

        def has_ended(_: Future[None]) -> None:
            if not asked.done():
                asked.set_result(None)

        if self._asked is not None:
            self._asked.result()  # tokenizers work on one thread at a time
        before, self._asked = self._asked, asked
        self._others.put(work).add_done_callback(has_ended)
        self._answer(before)

    def _make_here(self, make: Callable[[], None]) -> None:
        self._calls, self._modes = [], _modes()
        began = time.monotonic()
        make()
        self._asks_once = self._calls == [self._modes]
        if not self._calls:
            self.busy += time.monotonic() - began

    def _on_caching_thread(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """In place of the encoding strategy's method."""
        run = partial(function, *arguments, **options)
        asked: Future[_Call | None] | None = getattr(self._thread, "asked", None)
        if asked is None:
            return self._run(run)
        self._thread.asked = None
        call = _Call(run, _is_grad_enabled())
        asked.set_result(call)
        while True:
            with suppress(Empty):
                return call.outputs.get(timeout=_SECONDS)
            if self.stopped:
                raise CancelledError

    def _answer(self, asked: Future[_Call | None] | None) -> None:
        """Do what a batch waits for; None: it has ended without."""
        import torch

        call = None if asked is None else asked.result()
        if call is not None:
            with torch.set_grad_enabled(call.with_grad):
                call.outputs.put(self._run(call.run))

    def _run(self, run: Callable[[], Any]) -> Any:
        if self._is_inside:  # one method of an encoding strategy may use another
            return run()
        self._calls.append(_modes())
        self._is_inside, began = True, time.monotonic()
        try:
            outputs = run()
            _await_device(outputs)
            return outputs
        finally:
            self._is_inside = False
            self.busy += time.monotonic() - began


def _is_grad_enabled() -> bool:
    import torch

    return bool(torch.is_grad_enabled())


def _modes() -> tuple[bool, ...]:
    """What a strategy may have set for the encoder on this thread, besides `no_grad`."""
    import torch

    return torch.is_autocast_enabled(), torch.is_inference_mode_enabled()


def _await_device(outputs: Any) -> None:
    """Until they are there: other threads have streams of their own."""
    import torch

    parts = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    for device in {part.device for part in parts if getattr(part, "is_cuda", False)}:
        torch.cuda.current_stream(device).synchronize()
