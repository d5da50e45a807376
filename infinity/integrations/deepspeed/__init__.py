"""DeepSpeed's interface for its scripts and Hugging Face's libraries, implemented with infinity's own API.

The table in `namespace.py` lists the modules, their names, and the files here that implement them. `finder.py` makes
these modules when they are imported, and `../as_deepspeed.py` puts `deepspeed` on a process's path. Unsupported names
raise an error that says what to use instead.
"""
