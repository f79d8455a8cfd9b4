#!/usr/bin/env python3
"""Records what a Firecracker answers to the requests of `requests.json`.

Usage: record.py FIRECRACKER REQUESTS OUTPUT [SESSION...]

Each session is a process of its own, with its options, in a directory of its own that holds the
files of `prepare`. `$DIR` in options, paths and bodies stands for that directory, in the answers
too. The output has, for each request, the status and the body that came back: parsed JSON, or the
text if it is none, or null.
"""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time

PATIENCE_SECONDS = 20


def tiny_kernel():
    """An ELF executable for x86_64 whose only code halts the processor, again and again."""
    code = bytes([0xFA, 0xF4, 0xEB, 0xFD])
    entry = 0x1000000
    header = struct.pack(
        "<4sBBBBQHHIQQQIHHHHHH",
        *(b"\x7fELF", 2, 1, 1, 0, 0, 2, 62, 1, entry, 64, 0, 0, 64, 56, 1, 64, 0, 0),
    )
    program = struct.pack("<IIQQQQQQ", 1, 5, 4096, entry, entry, len(code), len(code), 4096)
    return (header + program).ljust(4096, b"\0") + code


def prepare(directory):
    files = {
        "kernel": tiny_kernel(),
        "not-a-kernel": b"neither ELF nor bzImage\n" * 200,
        "initrd": b"0" * 4096,
        "disk": bytes(1 << 20),
        "disk2": bytes(2 << 20),
        "garbage": b"garbage",
    }
    for name, content in files.items():
        with open(os.path.join(directory, name), "wb") as file:
            file.write(content)
    os.mkdir(os.path.join(directory, "folder"))
    with open(os.path.join(directory, "config.json"), "w") as file:
        json.dump(
            {
                "boot-source": {"kernel_image_path": directory + "/kernel", "boot_args": "quiet"},
                "drives": [
                    {
                        "drive_id": "rootfs",
                        "path_on_host": directory + "/disk",
                        "is_root_device": True,
                        "is_read_only": False,
                    }
                ],
                "machine-config": {"vcpu_count": 1, "mem_size_mib": 128},
            },
            file,
        )
    with open(os.path.join(directory, "metadata.json"), "w") as file:
        json.dump({"latest": {"meta-data": {"ami-id": "ami-12345678"}}}, file)


def connect(path, process):
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(PATIENCE_SECONDS)
        try:
            client.connect(path)
            return client
        except OSError:
            client.close()
            if process.poll() is not None or time.monotonic() > end:
                raise
            time.sleep(0.02)


def exchange(client, method, path, body):
    text = body.encode() if body is not None else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n"
    client.sendall(head.encode() + b"\r\n" + text)
    answer = b""
    while b"\r\n\r\n" not in answer:
        more = client.recv(65536)
        if not more:
            return None, None, None
        answer += more
    head, rest = answer.split(b"\r\n\r\n", 1)
    lines = head.decode().split("\r\n")
    fields = dict(line.lower().split(": ", 1) for line in lines[1:] if ": " in line)
    length = int(fields.get("content-length", 0))
    while len(rest) < length:
        rest += client.recv(65536)
    return int(lines[0].split()[1]), rest.decode(), "deprecation" in fields


def as_document(text):
    if not text:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return text


def record(program, session):
    with tempfile.TemporaryDirectory() as directory:
        prepare(directory)
        here = lambda text: text.replace("$DIR", directory)
        path = os.path.join(directory, "api.sock")
        options = [here(option) for option in session.get("options", [])]
        log = open(os.path.join(directory, "output"), "w")
        start = lambda: subprocess.Popen(
            [program, "--api-sock", path, *options],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        )
        process = start()
        client, recorded = None, []
        try:
            for step in session["requests"]:
                if step.get("restart"):
                    client.close()
                    process.kill()
                    process.wait()
                    # Another monitor may remove the name of its socket itself.
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                    process = start()
                    client = None
                    continue
                if client is None:
                    client = connect(path, process)
                method, target, body = step["request"]
                if body is not None and not isinstance(body, str):
                    body = json.dumps(body)
                body = here(body) if body is not None else None
                status, text, deprecated = exchange(client, method, here(target), body)
                if status is None:
                    recorded.append({"request": step["request"], "status": None})
                    client.close()
                    client = None
                    continue
                text = text.replace(directory, "$DIR")
                one = {"request": step["request"], "status": status, "body": as_document(text)}
                if deprecated:
                    one["deprecated"] = True
                recorded.append(one)
        finally:
            process.kill()
            process.wait()
            log.close()
            if any(one["status"] is None for one in recorded):
                sys.stderr.write(open(os.path.join(directory, "output")).read()[-2000:])
        return recorded


def main():
    program, requests, output, *names = sys.argv[1:]
    version = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    version = version.split()[1]
    with open(requests) as file:
        sessions = json.load(file)
    answers = []
    for session in sessions:
        if names and session["name"] not in names:
            continue
        recorded = record(program, session)
        kept = {key: session[key] for key in session if key != "requests"}
        restarts = [i for i, step in enumerate(session["requests"]) if step.get("restart")]
        for count, index in enumerate(restarts):
            recorded.insert(index, {"restart": True})
        answers.append({**kept, "requests": recorded})
        print(session["name"], len(recorded), file=sys.stderr)
    with open(output, "w") as file:
        file.write('{"firecracker": ' + json.dumps(version) + ', "sessions": [\n')
        for number, session in enumerate(answers):
            requests = session.pop("requests")
            file.write(json.dumps(session)[:-1] + ', "requests": [\n')
            file.write(",\n".join("  " + json.dumps(one) for one in requests))
            file.write("\n]}" + ("," if number + 1 < len(answers) else "") + "\n")
        file.write("]}\n")


main()
