#!lua name=diptych_directory__VERSION__
-- Who holds which chunk. KEYS: 1 what the holder holds, then the chunks' hashes (holder -> tier).
--
-- A holder is worker@epoch. The set of what it holds is there so that a dead holder can be swept in pieces without a
-- scan. Callers pass at most 500 chunks a call: one call over 300,000 blocked the server for 0.8 s.

local function write(verb, key, ...)
  if type(redis.pcall(verb, key, ...)) == 'table' then -- a key of another type
    redis.call('DEL', key)
    redis.call(verb, key, ...)
  end
end

-- ARGV: holder, ttl in ms, length of the chunk keys' prefix, a tier a chunk.
local function publish(keys, argv)
  local holder, ttl_ms, prefix = argv[1], argv[2], tonumber(argv[3])
  local names = {}
  for i = 2, #keys do
    write('HSET', keys[i], holder, argv[i + 2])
    redis.call('PEXPIRE', keys[i], ttl_ms)
    names[i - 1] = string.sub(keys[i], prefix + 1)
  end
  write('SADD', keys[1], unpack(names))
  return redis.call('PEXPIRE', keys[1], ttl_ms)
end

-- ARGV: holder, length of the chunk keys' prefix. Returns how many were there.
local function withdraw(keys, argv)
  local names, removed = {}, 0
  for i = 2, #keys do
    local count = redis.pcall('HDEL', keys[i], argv[1])
    if type(count) == 'number' then removed = removed + count end
    names[i - 1] = string.sub(keys[i], tonumber(argv[2]) + 1)
  end
  redis.pcall('SREM', keys[1], unpack(names))
  return removed
end

-- ARGV: holder, prefix of the chunk keys, most chunks. Returns how many it took out; 0: none is left.
local function sweep(keys, argv)
  local names = redis.pcall('SPOP', keys[1], argv[3])
  if names.err then return 0 end
  for _, name in ipairs(names) do redis.pcall('HDEL', argv[2] .. name, argv[1]) end
  return #names
end

local function is_plain(text)
  return not string.find(text, '%c')
end

-- KEYS: the chunks' hashes. Returns a line for each, "holder tab tier tab holder tab tier": one answer of many lines is
-- read several times faster than an answer of many parts.
local function locate(keys)
  local lines = {}
  for i, key in ipairs(keys) do
    local holders, words = redis.pcall('HGETALL', key), {}
    for j = 1, #holders, 2 do
      if is_plain(holders[j]) and is_plain(holders[j + 1]) then
        words[#words + 1] = holders[j]
        words[#words + 1] = holders[j + 1]
      end
    end
    lines[i] = table.concat(words, '\t')
  end
  return table.concat(lines, '\n')
end

redis.register_function('diptych_directory_publish__VERSION__', publish)
redis.register_function{
  function_name='diptych_directory_withdraw__VERSION__', callback=withdraw, flags={'allow-oom'}}
redis.register_function{
  function_name='diptych_directory_sweep__VERSION__', callback=sweep, flags={'allow-oom'}}
redis.register_function{
  function_name='diptych_directory_locate__VERSION__', callback=locate, flags={'no-writes'}}
