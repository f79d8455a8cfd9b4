"""What firecracker-python asks for before it starts a machine: a Docker daemon that says its
version, and a server that says this host's public address."""

import http.server
import os
import socketserver
import ssl
import subprocess
import threading

ADDRESS = "10.99.0.2"


class Docker(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"ApiVersion": "1.43", "MinAPIVersion": "1.12", "Version": "24.0"}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self):
        return "unix"

    def log_message(self, *_):
        pass


class Address(Docker):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", str(len(ADDRESS)))
        self.end_headers()
        self.wfile.write(ADDRESS.encode())


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def start(directory="/srv/services"):
    """Starts both servers in threads."""
    os.makedirs(directory)
    if os.path.exists("/run/docker.sock"):
        os.remove("/run/docker.sock")
    docker = UnixServer("/run/docker.sock", Docker)
    threading.Thread(target=docker.serve_forever, daemon=True).start()
    key, certificate = f"{directory}/key.pem", f"{directory}/certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-subj", "/CN=ifconfig.me", "-addext", "subjectAltName=DNS:ifconfig.me",
         "-keyout", key, "-out", certificate],
        check=True, capture_output=True)
    with open("/etc/hosts", "a") as hosts:
        hosts.write("127.0.0.1 ifconfig.me\n")
    os.environ["REQUESTS_CA_BUNDLE"] = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 443), Address)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
