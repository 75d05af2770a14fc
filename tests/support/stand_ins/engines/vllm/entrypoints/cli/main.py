"""The part of `vllm serve` that `run.py serve --http` uses. A token follows each 10 ms."""

import argparse
import json
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        wrong = os.environ.get("STAND_IN") == "refuses" or self.path != "/inference/v1/generate"
        self.send_response(400 if wrong else 200)
        self.end_headers()
        if wrong:
            return
        sampling = body["sampling_params"]
        assert body["stream"] and body["token_ids"] and sampling["ignore_eos"]
        for n in range(sampling["max_tokens"]):
            time.sleep(0.01)
            self.wfile.write(b"data: " + json.dumps({"token_ids": [n]}).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--tokens-only", action="store_true")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    parser.add_argument("--hf-overrides", type=json.loads)
    options, _ = parser.parse_known_args()
    assert options.tokens_only and options.enable_prefix_caching is False
    assert options.model.endswith("qwen3-30b-a3b")
    assert options.hf_overrides == {"num_hidden_layers": 2}
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
