"""The doctor over many steps: `Watch` takes traces in order, `Course` says what they show together.

arrival.py (do weights arrive), places.py (one engine, one place), shape.py (how a figure grows, since when), causes.py
(faults that span steps), words.py (the report), page.py and heat.py (the page).
"""
