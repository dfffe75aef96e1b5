"""A peer that is gone is noticed beside whatever the process waits for."""

from __future__ import annotations

import threading
import time

from specreg.runtime.peer_watch import POLL_SECONDS, PeerWatch

SECONDS = 10.0


def test_a_lost_peer_is_told_once_and_ends_the_watch() -> None:
    told, calls = threading.Event(), []

    def free() -> None:
        calls.append(1)
        told.set()

    watch = PeerWatch(lambda: True, free)
    assert told.wait(SECONDS)
    watch.close()
    watch.close()
    assert calls == [1]


def test_a_closed_watch_asks_no_more() -> None:
    asked, questions = threading.Event(), []

    def is_lost() -> bool:
        questions.append(1)
        asked.set()
        return False

    watch = PeerWatch(is_lost, lambda: None)
    assert asked.wait(SECONDS)
    watch.close()
    num_asked = len(questions)
    time.sleep(3 * POLL_SECONDS)
    assert len(questions) == num_asked
