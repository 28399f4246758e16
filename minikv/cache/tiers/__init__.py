"""Tiers below the page pool: spans of entries in host memory (warm) and in a file (cold).

span.py     the record of a span: header, body, checksums
forms.py    representations of keys and values: exact, int8 rows, low rank
encode.py   entries to spans and back, the cheapest form that keeps within an error
late.py     spans whose rows are still on their way from a device
base.py     what all tiers have in common
warm.py     spans in memory under a ceiling
cold.py     spans in a file under a ceiling; cold_file.py is that file
tiers.py    both together: demotion, promotion, counters
moves.py    between the lanes of a sequence and spans
storage.py  the tiers as an engine uses them
below.py    what a conversation held before it was compressed
"""
