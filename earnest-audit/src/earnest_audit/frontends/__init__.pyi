from earnest_audit.frontends.libraries import lightning as lightning
from earnest_audit.frontends.libraries import prime_rl as prime_rl
from earnest_audit.frontends.libraries import recipe as recipe
from earnest_audit.frontends.libraries import verl as verl
