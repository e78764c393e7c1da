"""The study: its criteria, which folders of results answer them, its tables and its pictures. No part of any wheel.

criteria.yaml and folders.yaml are the data. Scripts: tables.py (verdicts), pictures.py (results/figures).
"""
