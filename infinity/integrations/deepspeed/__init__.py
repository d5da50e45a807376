"""DeepSpeed's dialect: what its scripts and Hugging Face's libraries import from it, in terms of our own API.

`namespace.py` says in which module a name is found and which file here implements it, `finder.py` makes these modules
as they are imported, and `../as_deepspeed.py` puts `deepspeed` on a process's path. What is not here is refused by
name.
"""
