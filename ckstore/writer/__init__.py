"""The writer process: it writes saves of another process in the background, out of memory that both see.

    python -c … ckstore.writer --fd N    started by the trainer's side (`launch`), never by hand

    messages   what the two say to each other
    errors     errors as data, and back
    sources    which ckstore a process runs
    launch     starting a writer with the ckstore and the dependencies of the trainer
    watch      noticing that it was stopped
    service    the writer's side
    client     the trainer's side

It is a process, so that hashing, encoding and writing never hold the trainer's interpreter lock, and so that a save
which was handed over is finished when the trainer dies. It has a session of its own: what kills the trainer's process
group does not reach it. It imports no torch, and it ends when the trainer's end of the socket is closed.
"""
