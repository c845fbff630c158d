"""The doctor over many steps: `Watch` takes traces in order, `Course` is their joint reading.

arrival.py (whether weights arrive), places.py (one engine, one batch place), shape.py (how and since when a figure
grows), causes.py (faults that span steps), words.py (the report), page.py (the page).
"""
