#!/bin/sh
# Redis with a user for each role: makes passwords and rules, then becomes the server.
#
# A password comes from REDIS_<ROLE>_PASSWORD, else from the role's volume, else from the kernel, once. It is put into
# the role's volume, which nobody but Redis and that role mounts. The rules hold its digest only.
set -eu
secrets=/run/diptych

password_of() {  # role, what was given
  file=$secrets/$1/password
  mkdir -p "$secrets/$1"
  if [ -n "$2" ]; then
    case $2 in *[!A-Za-z0-9._~-]*)
      echo "the password of $1 may hold letters, digits and . _ ~ - only: it becomes a part of a URL" >&2
      exit 2 ;;
    esac
    printf %s "$2" >"$file"
  elif [ ! -s "$file" ]; then
    od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"$file"
  fi
  chmod 644 "$file"
}

password_of router "${REDIS_ROUTER_PASSWORD:-}"
password_of cache "${REDIS_CACHE_PASSWORD:-}"
password_of prefill "${REDIS_PREFILL_PASSWORD:-}"
password_of decode "${REDIS_DECODE_PASSWORD:-}"
password_of operator "${REDIS_OPERATOR_PASSWORD:-}"

rules=$(sed -e '/^#/d' -e '/^$/d' /etc/diptych/users.acl)
for role in router cache prefill decode operator; do
  digest=$(sha256sum "$secrets/$role/password" | cut -d ' ' -f 1)
  rules=$(printf '%s\n' "$rules" | sed "s/^user $role on /user $role on #$digest /")
done
case $(redis-server --version) in
  *v=7.0.*) rules=$(printf '%s\n' "$rules" | sed 's/ +client|setinfo//') ;;  # it came with 7.2
esac
printf '%s\n' "$rules" >"$secrets/users.acl"

# All of it is soft state: nothing is written to disk, and a full memory refuses instead of forgetting.
set -- redis-server --bind '*' --protected-mode no --aclfile "$secrets/users.acl" \
  --save '' --appendonly no --maxmemory "${REDIS_MAXMEMORY:-256mb}" --maxmemory-policy noeviction "$@"
exec setpriv --reuid=redis --regid=redis --clear-groups --no-new-privs "$@"
