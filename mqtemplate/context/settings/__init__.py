"""Typed settings: the sections ``rocketmq.*`` and ``mqtemplate.*``, and what the brokers make of them."""
