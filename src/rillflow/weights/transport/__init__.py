"""The transport of published weights from a store to its readers.

sources       the store's folder, weight servers over HTTP, a source in its own thread; `open_source` chooses one
object_store  the source on an object store, and the uploader that copies a store to one
mirrors       several servers of the same weights; download: one file by concurrent ranges
cache         partial files, and files that can be fetched again
serve         the weight server, its routes and shelves
relay         a server that fetches what it is asked for; following: the line upstream
"""
