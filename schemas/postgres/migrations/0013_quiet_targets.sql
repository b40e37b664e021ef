-- Rows of targets come with every URL ever called. What is in trouble is found without reading those that are well; and a
-- prefix, the next page and the next few that may be forgotten are found by an index whatever the collation of the database.
CREATE INDEX target_troubled ON penstock.target (url COLLATE "C") WHERE state <> 'normal';
CREATE INDEX target_url ON penstock.target (url COLLATE "C");
