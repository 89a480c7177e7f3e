"""Runs in the trackers' environment: send the spans of a run folder to a receiver in this process, twice.

    python otlp.py RUN

The first time the receiver refuses everything. Prints, as JSON, what a person would have been told each time, and the
spans that the receiver decoded.
"""

from __future__ import annotations

import gzip
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from rillflow.observe.trackers.services import SpanExport

received: list[dict[str, Any]] = []
refuses = threading.Event()


class Receiver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        self.send_response(400 if refuses.is_set() else 200)
        self.end_headers()
        if not refuses.is_set():
            received.extend(decoded(ExportTraceServiceRequest.FromString(data)))

    def log_message(self, *_: Any) -> None: ...


def decoded(request: ExportTraceServiceRequest) -> list[dict[str, Any]]:
    return [
        {
            "name": span.name,
            "trace": span.trace_id.hex(),
            "span": span.span_id.hex(),
            "begin": span.start_time_unix_nano,
            "end": span.end_time_unix_nano,
            "attributes": values(span.attributes),
            "resource": values(resource.resource.attributes),
            "links": [link.span_id.hex() for link in span.links],
            "failed": span.status.code == 2,
        }
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def values(attributes: list[KeyValue]) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def sent(endpoint: str, run: Path) -> list[str]:
    export = SpanExport(endpoint, run, [run / "ledger.sqlite"], every=0.05)
    export.start()
    export.stop("finished")
    export.join(120.0)
    return export.news


def main() -> None:
    run = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    refuses.set()
    refused = sent(endpoint, run)
    refuses.clear()
    news = sent(endpoint, run)
    again = sent(endpoint, run)
    print(json.dumps({"refused": refused, "news": news, "again": again, "spans": received}))


if __name__ == "__main__":
    main()
