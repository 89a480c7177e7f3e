"""The transport of published weights from a store to its readers.

sources     the store's folder, an object store, a source in its own thread; `open_source` chooses one
remote      the source over HTTP: mirrors (several servers), download (concurrent ranges)
cache       partial files, and files that can be fetched again
serve       the weight server, its routes and shelves
relay       a server that fetches what it is asked for; following: the line upstream
upload      copies the store to an object store
"""
