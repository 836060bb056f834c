"""Tasks of `bench.celery_eta`, for its workers and for the process that sends."""

from __future__ import annotations

import os
import struct
import time

from celery import Celery

from mqtemplate_starter_celery import MQTemplate

RUN = struct.Struct("<iqq")  # number, due time and time of the run, in epoch ms

celery = Celery("bench", broker=os.environ["BENCH_REDIS"])
celery.conf.worker_hijack_root_logger = False
messages = None
if name_server := os.environ.get("BENCH_NAME_SERVER"):
    messages = MQTemplate(app=celery, settings={"rocketmq.name-server": name_server})


@celery.task(name="tick", ignore_result=True)
def tick(number: int, due_ms: int) -> None:
    """Note that the task has run. One small write with O_APPEND is not mixed with writes of other processes."""
    file = os.open(os.environ["BENCH_RUNS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, RUN.pack(number, due_ms, time.time_ns() // 1_000_000))
    finally:
        os.close(file)
