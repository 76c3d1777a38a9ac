#!/bin/sh
# redis-cli as the operator, who may do everything: docker compose exec redis sh /etc/diptych/cli.sh ACL LOG
REDISCLI_AUTH=$(cat /run/diptych/operator/password)
export REDISCLI_AUTH
exec redis-cli --user operator --no-auth-warning "$@"
