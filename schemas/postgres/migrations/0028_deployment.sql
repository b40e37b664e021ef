-- Names this database. A copy that is restored has the same name, since it takes the place of the
-- original; a second database beside it has another. The prefix on Kafka is bound to it.
CREATE TABLE penstock.deployment (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    id  uuid NOT NULL DEFAULT gen_random_uuid()
);
INSERT INTO penstock.deployment DEFAULT VALUES;
