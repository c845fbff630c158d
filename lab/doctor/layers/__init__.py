"""The place where the engines part: the first layer and module whose output leaves the band of the precision.

states.py (a dump of hidden states), reference.py (the model that it is compared with), modules.py (each module on its
own recorded inputs), routers.py (a trace alone: routes beyond their margin), pair.py (two dumps without a model),
words.py (the report).
"""
