"""Signals: asked once, the loop stops between steps; asked thrice, the process leaves at once."""

import os
import signal
import subprocess
import sys

import pytest

from herder.train.interrupt import StopRequest


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_noted_and_raises_nothing(
    number: signal.Signals, status: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert (stop.signal, stop.exit_status) == (None, 0)
        os.kill(os.getpid(), number)
        assert (stop.signal, stop.exit_status) == (number, status)
    assert signal.getsignal(number) is before
    assert "finishing this step, then saving" in capfd.readouterr().err


def test_a_second_signal_says_how_to_leave_and_keeps_the_first_ones_status(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.exit_status == 143
    assert "once more leaves at once, without saving" in capfd.readouterr().err


def test_a_third_signal_ends_the_process_where_it_is() -> None:
    program = (
        "import os, signal\n"
        "from herder.train.interrupt import StopRequest\n"
        "with StopRequest():\n"
        "    for _ in range(3): os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('still here')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (143, "")
    assert "leaving at once" in done.stderr


def test_signals_are_caught_before_torch_is_imported() -> None:
    program = (
        "import sys, herder.cli.train, herder.train.interrupt\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
