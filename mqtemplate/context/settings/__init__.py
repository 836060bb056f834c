"""Typed settings: the models behind ``rocketmq.*`` and ``mqtemplate.*``."""
