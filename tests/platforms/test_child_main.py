"""Test that a child process says why it could not start, whatever became of its streams."""

import subprocess
import sys

from patience import PATIENCE

from minivllm.platforms.child_processes import start_process


def test_an_error_of_its_module_is_told(tmp_path, monkeypatch, capfd):
    (tmp_path / "broken.py").write_text("import no_such_module")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sock, process = start_process("broken")
    with sock:
        assert process.wait(PATIENCE) == 1
    assert "No module named 'no_such_module'" in capfd.readouterr().err


def test_it_serves_without_standard_output(tmp_path):
    (tmp_path / "served.py").write_text("def serve(sock):\n    sock.sendall(b'served')\n    return 3")
    parent = """
import sys
sys.path.insert(0, sys.argv[1])
from minivllm.platforms.child_processes import start_process
sock, process = start_process("served")
print(sock.recv(6).decode(), process.wait(), file=sys.stderr)
"""
    command = ["sh", "-c", 'exec "$0" -c "$1" "$2" >&-', sys.executable, parent, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert "served 3" in ended.stderr
