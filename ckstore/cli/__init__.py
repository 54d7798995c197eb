"""The command line: `ckstore ls`, `ckstore verify` and the rest, on top of `ckstore.Store`.

    main       the entry point            app        the commands and their help
    call       what every command shares  places     which argument is the store
    exits      error → exit code          output     the one door to stdout and to stderr
    documents  reports as JSON            tables     reports for people
    text       escaping, sizes, times     meter      progress on a terminal
    listing, labels, stores, upkeep, keys, repair, replicas   the commands
    plugins    the commands of other packages

Environment variables are read here and nowhere else in the engine. The engine is imported when a command runs.
"""
