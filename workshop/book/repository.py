def repository_address() -> str:
    return ""
