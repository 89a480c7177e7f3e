"""Runs in the trackers' environment: MLflow's own server application on an SQLite file. Prints its port.

    python mlflow_server.py FOLDER

`mlflow server` would start the same application in several processes, with job runners that need packages we leave out.
"""

from __future__ import annotations

import os
import sys

folder = sys.argv[1]
store = f"sqlite:///{folder}/mlflow.db"
# The variables that the application reads.
os.environ |= {"_MLFLOW_SERVER_FILE_STORE": store, "_MLFLOW_SERVER_ARTIFACT_ROOT": f"{folder}/artifacts"}

from mlflow.server import app  # noqa: E402
from mlflow.server.handlers import initialize_backend_stores  # noqa: E402
from werkzeug.serving import make_server  # noqa: E402

initialize_backend_stores(store, None, f"{folder}/artifacts")
server = make_server("127.0.0.1", 0, app, threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
