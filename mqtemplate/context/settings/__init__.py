"""Typed settings: the sections ``rocketmq.*`` and ``mqtemplate.*``, and their support by the brokers."""
