"""The fast path: frequent requests that are processed without decoding each, with the same results.

It rests on the bytes below. It is only an optimization: a server without it (``BrokerServer(fast_path=False)``) stores
the same records and gives the same answers, and `tests/server/fast_path/test_equivalence.py` compares the two for any
requests. Only at the end of a file of the log their positions may differ: sends that are stored by one append are in
one file.

**Header template** (`header_templates`). A frame is length, header and body. The headers of one client differ in few
values, here marked by ``|``; a pattern finds them, and all else is known from the first header of the template::

    i4 length | u1 0: JSON | u3 n | header of n bytes                                                          | body
    {"code":310,"extFields":{"a":"producers","b":"orders","c":"TBW102","d":"4","e":"|3|","f":"0","g":"|1700000000000|",
     "h":"5","i":"UNIQ_KEY\\u0001|7F000001A1|\\u0002WAIT\\u0001true\\u0002KEYS\\u0001|order-1|\\u0002","j":"0","k":"false",
     "m":"false"},"flag":0,"language":"JAVA","opaque":|7|,"version":513}

``e`` is the queue ID, ``g`` the time of birth, ``i`` the properties. Pulls differ in queue ID, two offsets and opaque.

**Properties template** (`mqtemplate.record.properties_template`). The field ``i`` becomes the properties of a record:
the separators are bytes there, and the broker adds its own properties at the end::

    UNIQ_KEY 01 |7F000001A1| 02 WAIT 01 true 02 KEYS 01 |order-1| 02 MSG_REGION 01 DefaultRegion 02 ...

**Uniform batch** (`mqtemplate.server.core.batches`, `mqtemplate.record.record_arrays`). The messages in the body of
a batch, if they differ in body and id only, are the rows of one array. All other columns are compared with the first
row::

    i4 size | i4 0 | i4 0 | i4 flag | i4 body length | body | i2 length | UNIQ_KEY 01 | id | 02 WAIT 01 true 02
    i4 size | i4 0 | i4 0 | i4 flag | i4 body length | body | i2 length | UNIQ_KEY 01 | id | 02 WAIT 01 true 02
                                                       differ                           differ

**Pipelined requests** (`pipelines`). Sends, batches and pulls of one connection that were read together are stored by
one append, made durable by one flush, and answered by one write to the socket. A request that no template matches, that
needs a new topic, queue or group, or that the store refuses is processed as a command, in the order of the connection.
With access control each request is a command: the guard checks its signature.
"""
