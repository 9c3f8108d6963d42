"""One signal requests a stop after the round, a second one ends everything, and handlers are restored."""

import multiprocessing
import os
import signal
import threading

import pytest

from lcfl.distributed.stop_flag import StopFlag, handlers_kept


def handlers():
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)


def test_the_first_signal_is_recorded_and_the_second_ends_everything():
    flag, before = StopFlag(), handlers()
    with handlers_kept():
        flag.install()
        assert flag.signal == 0
        signal.raise_signal(signal.SIGTERM)
        assert flag.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt) as raised:
            signal.raise_signal(signal.SIGINT)
        assert raised.value.args == (signal.SIGINT,), "the status of the process"
    assert handlers() == before


def test_the_flag_of_a_caller_hears_of_a_signal_as_well():
    outer, inner, before = StopFlag(), StopFlag(), handlers()
    with handlers_kept():
        outer.install()
        with handlers_kept():
            inner.install()
            inner.install()
            signal.raise_signal(signal.SIGTERM)
        assert outer.signal == inner.signal == signal.SIGTERM
    assert handlers() == before


def test_handlers_are_restored_after_an_error():
    before = handlers()
    with pytest.raises(ValueError, match="inside"), handlers_kept():
        StopFlag().install()
        assert handlers() != before
        raise ValueError("inside")
    assert handlers() == before


def test_a_second_signal_kills_the_children(deadline):
    process = multiprocessing.get_context("fork").Process(target=signal.pause)
    process.start()
    flag = StopFlag()
    flag(signal.SIGINT, None)
    assert process.is_alive()
    with pytest.raises(KeyboardInterrupt):
        flag(signal.SIGINT, None)
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_outside_the_main_thread_no_handler_is_set():
    before, inside = handlers(), []

    def work():
        with handlers_kept():
            StopFlag().install()
            inside.append(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]


def test_a_forked_rank_leaves_signals_to_its_parent():
    flag, before = StopFlag(), handlers()
    child = os.fork()
    if child == 0:
        try:
            flag.install()
            os._exit(0 if handlers() == before else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_lost_rank_is_not_a_signal():
    flag = StopFlag()
    flag.mark_lost()
    assert flag.signal == 0
