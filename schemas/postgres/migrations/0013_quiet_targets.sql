-- There is a row for every URL ever called. One index finds targets that are not normal without
-- reading the normal ones. The other finds prefixes, pages and unused targets under any database
-- collation.
CREATE INDEX target_troubled ON penstock.target (url COLLATE "C") WHERE state <> 'normal';
CREATE INDEX target_url ON penstock.target (url COLLATE "C");
